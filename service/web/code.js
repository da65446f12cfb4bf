// A request as code that makes it.

/** url: of the API's root, with a slash at its end. needsKey: whether the server asks for one. */
export function curl(request, url, needsKey) {
  const body = JSON.stringify(request, null, 2).replaceAll("'", "'\\''");
  const key = needsKey ? ` \\\n  -H "Authorization: Bearer $CHORUS_API_KEY"` : "";
  return `curl -N ${url}chat/completions \\\n  -H 'Content-Type: application/json'${key} \\\n  -d '${body}'\n`;
}

// Ours, and therefore nothing that the OpenAI client has parameters for.
const EXTENSIONS = ["fan_out", "return_token_ids"];

export function python(request, url, needsKey) {
  const own = Object.entries(request).filter(([name]) => !EXTENSIONS.includes(name));
  const extra = Object.fromEntries(EXTENSIONS.filter((name) => name in request).map((name) => [name, request[name]]));
  const lines = own.map(([name, value]) => `    ${name}=${literal(value, 1)},`);
  lines.push(`    extra_body=${literal(extra, 1)},`);
  const key = needsKey ? `os.environ["CHORUS_API_KEY"]` : `"none"`;
  return `${needsKey ? "import os\n\n" : ""}from openai import OpenAI

client = OpenAI(base_url=${literal(url.replace(/\/$/, ""), 0)}, api_key=${key})
stream = client.chat.completions.create(
${lines.join("\n")}
)
answers = [""] * ${request.n}
for chunk in stream:
    for choice in chunk.choices:
        answers[choice.index] += choice.delta.content or ""
print(answers)
`;
}

/** A JSON value in Python's spelling; strings and numbers are spelled alike. */
function literal(value, depth) {
  const inner = "    ".repeat(depth + 1);
  const outer = "    ".repeat(depth);
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const items = Object.entries(value).map(
    ([key, item]) => `${inner}${isList ? "" : `${JSON.stringify(key)}: `}${literal(item, depth + 1)},`,
  );
  if (items.length === 0) return isList ? "[]" : "{}";
  const [open, close] = isList ? ["[", "]"] : ["{", "}"];
  return `${open}\n${items.join("\n")}\n${outer}${close}`;
}
