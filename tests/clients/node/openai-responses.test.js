import assert from "node:assert/strict";
import { test } from "node:test";
import OpenAI from "openai";
import { zodResponsesFunction, zodTextFormat } from "openai/helpers/zod";
import { z } from "zod";
import { MODEL, PARIS, URL, idle, running } from "./running.js";

const client = new OpenAI({ baseURL: `${URL}/v1`, apiKey: "none", maxRetries: 0 });
const City = z.object({ name: z.string().max(20), continent: z.enum(["Africa", "America", "Asia", "Europe"]) });
const Weather = z.object({ city: z.enum(["Paris", "Rome"]), unit: z.enum(["C", "F"]) });
const weather = zodResponsesFunction({ name: "weather", parameters: Weather });
const asked = { model: MODEL, input: "What is the capital of France?", max_output_tokens: 80, temperature: 0 };

test("streamed and whole are the same answer", async () => {
  const whole = await client.responses.create(asked);
  assert.equal(whole.output_text, PARIS);
  assert.equal(whole.status, "completed");
  let text = "";
  let last;
  let number = 0;
  for await (const event of await client.responses.create({ ...asked, stream: true })) {
    assert.equal(event.sequence_number, number++);
    if (event.type === "response.output_text.delta") text += event.delta;
    last = event;
  }
  assert.equal(text, PARIS);
  assert.equal(last.type, "response.completed");
  assert.equal(last.response.usage.output_tokens, whole.usage.output_tokens);
});

test("the stream helper folds text and models", async () => {
  const same = { ...asked, text: { format: zodTextFormat(City, "city") } };
  const whole = await client.responses.parse(same);
  const folded = await client.responses.stream(same).finalResponse();
  assert.deepEqual(folded.output_parsed, City.parse(whole.output_parsed));
});

test("tools go round their loop", async () => {
  const input = [{ role: "user", content: "What is the weather in Rome?" }];
  const tools = [weather];
  const called = await client.responses
    .stream({ ...asked, input, tools, tool_choice: "required", parallel_tool_calls: false })
    .finalResponse();
  const [call] = called.output;
  assert.equal(call.type, "function_call");
  Weather.parse(call.parsed_arguments);
  const told = { type: "function_call_output", call_id: call.call_id, output: '{"degrees": 31}' };
  const answer = await client.responses.create({
    ...asked,
    input: [...input, ...called.output, told],
    tools,
    tool_choice: "none",
  });
  assert.ok(answer.output_text);
});

test("an aborted stream leaves nothing running", { timeout: 60_000 }, async () => {
  const endless = { ...asked, max_output_tokens: 1900, ignore_eos: true, stream: true };
  const stream = await client.responses.create(endless);
  for await (const event of stream) {
    if (stream.controller.signal.aborted || event.type !== "response.output_text.delta") continue;
    assert.equal((await running()).length, 1);
    stream.controller.abort();
  }
  await idle();
});

test("a refusal is the client's own error with its field", async () => {
  await assert.rejects(client.responses.create({ ...asked, background: true }), (error) => {
    assert.ok(error instanceof OpenAI.BadRequestError);
    assert.equal(error.param, "background");
    return true;
  });
});
