// What the tests ask the server itself.
import { setTimeout } from "node:timers/promises";

export const URL = process.env.CHORUS_URL;
export const MODEL = "SmolLM2-135M-Instruct";
export const EMBEDDER = "all-MiniLM-L6-v2";
export const PARIS = "The capital of France is Paris.";
export const QUESTION = [{ role: "user", content: "What is the capital of France?" }];

/** The requests that run now. */
export async function running() {
  return (await (await fetch(`${URL}/v1/requests`)).json()).data;
}

/** Until none runs; the test runner's own time limit bounds it. */
export async function idle() {
  while ((await running()).length > 0) await setTimeout(20);
}
