import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, Output, generateObject, generateText, stepCountIs, streamObject, streamText, tool } from "ai";
import { z } from "zod";
import { MODEL, PARIS, QUESTION, URL, idle, running } from "./running.js";

const chorus = createOpenAICompatible({
  name: "chorus",
  baseURL: `${URL}/v1`,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = chorus(MODEL);
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
  const usage = await streamed.usage;
  assert.equal(usage.inputTokens, 37);
  assert.equal(usage.outputTokens, whole.usage.outputTokens);
});

test("a completion model streams the same text", async () => {
  const completion = { model: chorus.completionModel(MODEL), prompt: "The sky is", maxOutputTokens: 8, temperature: 0 };
  const whole = await generateText({ ...completion, maxRetries: 0 });
  let text = "";
  for await (const delta of streamText({ ...completion, maxRetries: 0 }).textStream) text += delta;
  assert.ok(text);
  assert.equal(text, whole.text);
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

test("objects by their own functions, whole and streamed", async () => {
  const whole = (await generateObject({ ...asked, schema: City })).object;
  assert.deepEqual(whole, City.parse(whole));
  const streamed = streamObject({ ...asked, schema: City });
  let last;
  for await (const partial of streamed.partialObjectStream) last = partial;
  assert.deepEqual(last, whole);
});

test("tools go round their loop, whole and streamed", async () => {
  const cities = [];
  const weather = tool({
    description: "The weather in a city",
    inputSchema: z.object({ city: z.enum(["Paris", "Rome"]) }),
    execute: async ({ city }) => {
      cities.push(city);
      return { degrees: 31 };
    },
  });
  const loop = {
    ...asked,
    prompt: "What is the weather in Rome?",
    messages: undefined,
    tools: { weather },
    stopWhen: stepCountIs(3),
    prepareStep: ({ stepNumber }) => ({
      toolChoice: stepNumber === 0 ? { type: "tool", toolName: "weather" } : "none",
    }),
  };
  const whole = await generateText(loop);
  assert.equal(whole.steps.length, 2);
  assert.equal(whole.steps[0].toolResults[0].output.degrees, 31);
  assert.ok(whole.text);
  const streamed = streamText(loop);
  await streamed.consumeStream();
  const steps = await streamed.steps;
  assert.equal(steps.length, 2);
  assert.deepEqual(steps[0].toolCalls[0].input, whole.steps[0].toolCalls[0].input);
  assert.equal(await streamed.text, whole.text);
  assert.deepEqual(cities, [cities[0], cities[0]]);
});

test("an aborted stream leaves nothing running", { timeout: 60_000 }, async () => {
  const abort = new AbortController();
  const endless = { ...asked, maxOutputTokens: 1900, providerOptions: { chorus: { ignore_eos: true } } };
  const streamed = streamText({ ...endless, abortSignal: abort.signal });
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

test("a refusal is the client's own error, and says why", async () => {
  await assert.rejects(generateText({ ...asked, topP: 7 }), (error) => {
    assert.ok(APICallError.isInstance(error));
    assert.equal(error.statusCode, 400);
    assert.match(error.message, /top_p/);
    return true;
  });
});
