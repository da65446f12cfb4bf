import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";
import { EMBEDDER, MODEL, PARIS, QUESTION, URL, idle, running } from "./running.js";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const City = z.object({ name: z.string().max(20), continent: z.enum(["Africa", "America", "Asia", "Europe"]) });
const Weather = z.object({ city: z.enum(["Paris", "Rome"]), unit: z.enum(["C", "F"]) });
const weather = zodFunction({ name: "weather", parameters: Weather });
const asked = { model: MODEL, messages: QUESTION, max_tokens: 80 };

test("n=3 streamed and whole are the same answer", async () => {
  const greedy = { ...asked, n: 3, temperature: 0 };
  const whole = await client.chat.completions.create(greedy);
  assert.deepEqual(whole.choices.map((choice) => choice.message.content), [PARIS, PARIS, PARIS]);
  const texts = ["", "", ""];
  const ends = [];
  let usage;
  const stream = await client.chat.completions.create({
    ...greedy,
    stream: true,
    stream_options: { include_usage: true },
  });
  for await (const chunk of stream) {
    for (const choice of chunk.choices) {
      texts[choice.index] += choice.delta.content ?? "";
      if (choice.finish_reason) ends.push(choice.finish_reason);
    }
    usage = chunk.usage ?? usage;
  }
  assert.deepEqual(texts, [PARIS, PARIS, PARIS]);
  assert.deepEqual(ends, ["stop", "stop", "stop"]);
  assert.equal(usage.completion_tokens, whole.usage.completion_tokens);
});

test("parse gives every choice as the schema has it", async () => {
  const answer = await client.chat.completions.parse({
    ...asked,
    n: 3,
    seed: 1,
    response_format: zodResponseFormat(City, "city"),
  });
  assert.equal(answer.choices.length, 3);
  for (const { message, finish_reason } of answer.choices) {
    assert.equal(finish_reason, "stop");
    assert.deepEqual(message.parsed, City.parse(JSON.parse(message.content)));
  }
});

test("the stream helper folds text, models and calls of every choice", async () => {
  for (const more of [
    { response_format: zodResponseFormat(City, "city") },
    { tools: [weather], tool_choice: { type: "function", function: { name: "weather" } } },
  ]) {
    const same = { ...asked, n: 3, seed: 4, ...more };
    const whole = await client.chat.completions.parse(same);
    const folded = await client.chat.completions.stream(same).finalChatCompletion();
    assert.equal(folded.choices.length, 3);
    for (const [index, { message }] of folded.choices.entries()) {
      const expected = whole.choices[index].message;
      assert.equal(message.content, expected.content);
      assert.deepEqual(message.parsed, expected.parsed);
      const arguments_ = (of) => of.tool_calls?.map((call) => call.function.parsed_arguments);
      assert.deepEqual(arguments_(message), arguments_(expected));
      if (more.tools) assert.deepEqual(arguments_(message), [Weather.parse(arguments_(message)[0])]);
    }
  }
});

test("tools go round their loop", async () => {
  const messages = [{ role: "user", content: "What is the weather in Rome?" }];
  const required = { tool_choice: "required", parallel_tool_calls: false };
  const called = await client.chat.completions.parse({ ...asked, messages, tools: [weather], ...required });
  const [{ message, finish_reason }] = called.choices;
  assert.equal(finish_reason, "tool_calls");
  const [call] = message.tool_calls;
  Weather.parse(call.function.parsed_arguments);
  const told = { role: "tool", tool_call_id: call.id, content: '{"degrees": 31}' };
  const answer = await client.chat.completions.create({
    ...asked,
    messages: [...messages, message, told],
    tools: [weather],
    tool_choice: "none",
  });
  assert.ok(answer.choices[0].message.content);
  assert.equal(answer.choices[0].message.tool_calls, undefined);
});

test("an aborted stream leaves nothing running", { timeout: 60_000 }, async () => {
  const stream = await client.chat.completions.create({ ...asked, n: 3, max_tokens: 1900, ignore_eos: true, stream: true });
  for await (const _ of stream) {
    if (stream.controller.signal.aborted) continue; // what had arrived before
    assert.equal((await running()).length, 1);
    stream.controller.abort();
  }
  await idle();
});

test("an aborted request that is not streamed leaves nothing running", { timeout: 60_000 }, async () => {
  const abort = new AbortController();
  const endless = { ...asked, n: 3, max_tokens: 1900, ignore_eos: true };
  const answer = client.chat.completions.create(endless, { signal: abort.signal });
  const refused = assert.rejects(answer, OpenAI.APIUserAbortError);
  while ((await running()).length === 0);
  abort.abort();
  await refused;
  await idle();
});

test("a refusal is the client's own error with its field", async () => {
  await assert.rejects(client.chat.completions.create({ ...asked, n: 0 }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "n");
    return true;
  });
});

test("embeddings, as floats and as what the client asks for by itself", async () => {
  const asked = { model: EMBEDDER, input: ["The cat sits on the mat.", "A kitten rests on a rug.", "Shares fell today."] };
  const byDefault = await client.embeddings.create(asked);
  const asFloats = await client.embeddings.create({ ...asked, encoding_format: "float" });
  const cosine = (a, b) => a.reduce((sum, value, index) => sum + value * b[index], 0);
  const vectors = byDefault.data.map((item) => item.embedding);
  assert.deepEqual(vectors.map((vector) => vector.length), [384, 384, 384]);
  for (const [index, vector] of vectors.entries()) assert.ok(cosine(vector, asFloats.data[index].embedding) > 0.99999);
  assert.ok(cosine(vectors[0], vectors[1]) > 0.5);
  assert.ok(cosine(vectors[0], vectors[2]) < 0.2);
  assert.equal(byDefault.usage.prompt_tokens, byDefault.usage.total_tokens);
  await assert.rejects(client.embeddings.create({ ...asked, dimensions: 64 }), { status: 400, param: "dimensions" });
});
