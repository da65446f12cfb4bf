// The server's API. URLs are relative, so that the page works under any path.

const STORED = "chorus-api-key";
let held = stored();

function stored() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return ""; // storage is switched off: the key lives as long as the page does
  }
}

/** The key, in this tab's session storage and nowhere else. */
export const apiKey = {
  get: () => held,
  set(value) {
    held = value;
    try {
      if (value) sessionStorage.setItem(STORED, value);
      else sessionStorage.removeItem(STORED);
    } catch {
      // as above
    }
  },
};

/** What went wrong. status: 0 when no answer came. retryAfter: seconds, or null. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code, retryAfter });
  }
}

/** The response, its body unread. Throws ApiError; an abort by `signal` is thrown as it is. */
export async function call(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (held) headers.Authorization = `Bearer ${held}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, body: body && JSON.stringify(body), signal, cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw await refusal(response);
  return response;
}

async function refusal(response) {
  const seconds = Number.parseFloat(response.headers.get("Retry-After"));
  const facts = { status: response.status, retryAfter: Number.isFinite(seconds) ? seconds : null };
  try {
    const { message, param, code } = (await response.json()).error;
    return new ApiError(message, { ...facts, param, code });
  } catch {
    return new ApiError(`The server answered ${response.status}.`, facts); // a proxy's page, say
  }
}

export const LOST = "The connection was lost before the answers had ended.";

function broken(error) {
  if (error.name === "AbortError") throw error;
  throw new ApiError(LOST);
}

export function errorEvent({ message, param, code }) {
  return new ApiError(message, { status: 200, param, code });
}

/** The data of server-sent events, as arrays: all that one read brought. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read().catch(broken);
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    yield blocks.filter((block) => block.startsWith("data: ")).map((block) => block.slice(6));
  }
}
