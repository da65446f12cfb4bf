// The AI SDK's own OpenAI provider, which speaks to /v1/responses.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { Output, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, PARIS, QUESTION, URL, idle, running } from "./running.js";

const model = createOpenAI({ baseURL: `${URL}/v1`, apiKey: "none" })(MODEL);
const asked = { model, messages: QUESTION, maxOutputTokens: 80, maxRetries: 0, temperature: 0 };
const City = z.object({ name: z.string().max(20), continent: z.enum(["Africa", "America", "Asia", "Europe"]) });

test("text, whole and streamed, with its usage", async () => {
  const whole = await generateText(asked);
  assert.equal(whole.text, PARIS);
  assert.equal(whole.finishReason, "stop");
  const streamed = streamText(asked);
  let text = "";
  for await (const delta of streamed.textStream) text += delta;
  assert.equal(text, PARIS);
  assert.equal((await streamed.usage).outputTokens, whole.usage.outputTokens);
});

test("an answer that is cut says so", async () => {
  const whole = await generateText({ ...asked, maxOutputTokens: 3 });
  assert.equal(whole.finishReason, "length");
});

test("structured output, whole and streamed", async () => {
  const output = Output.object({ schema: City });
  const whole = (await generateText({ ...asked, output })).output;
  assert.deepEqual(whole, City.parse(whole));
  const streamed = streamText({ ...asked, output });
  let last;
  for await (const partial of streamed.partialOutputStream) last = partial;
  assert.deepEqual(last, whole);
});

test("tools go round their loop, whole and streamed", async () => {
  const weather = tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async () => ({ degrees: 31 }),
  });
  const loop = {
    ...asked,
    tools: { weather },
    stopWhen: stepCountIs(3),
    prepareStep: ({ stepNumber }) => ({
      toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none",
    }),
    providerOptions: { openai: { store: false } },
  };
  const whole = await generateText(loop);
  assert.equal(whole.steps.length, 2);
  assert.equal(whole.steps[0].toolResults[0].output.degrees, 31);
  assert.ok(whole.text);
  const streamed = streamText(loop);
  await streamed.consumeStream();
  assert.equal((await streamed.steps).length, 2);
  assert.equal(await streamed.text, whole.text);
});

test("an aborted stream leaves nothing running", { timeout: 60_000 }, async () => {
  const abort = new AbortController();
  const long = { ...asked, prompt: "Count to a thousand.", messages: undefined, maxOutputTokens: 1900 };
  const streamed = streamText({ ...long, abortSignal: abort.signal });
  let aborted = false;
  for await (const part of streamed.fullStream) {
    if (part.type === "text-delta" && !abort.signal.aborted) {
      assert.equal((await running()).length, 1);
      abort.abort();
    }
    aborted ||= part.type === "abort";
  }
  assert.ok(aborted);
  await idle();
});
