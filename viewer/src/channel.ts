// Questions to the engine, in a worker made of the page's own script. Where that is forbidden (some
// notebooks), the engine runs in the page.

import { Engine, type Question, type Questions } from "./engine";

export interface Channel {
  ask<Q extends Question>(what: Q, about: Questions[Q][0]): Promise<Questions[Q][1]>;
  where: "worker" | "page";
}

const LONGEST_START_MS = 5000;

interface Asked {
  number: number;
  what: Question;
  about: never;
}

interface Answer {
  number: number;
  answer?: unknown;
  problem?: string;
}

/** The other end, inside the worker. */
export function serve(scope: DedicatedWorkerGlobalScope): void {
  const engine = new Engine();
  scope.onmessage = async (event: MessageEvent<Asked>) => {
    const { number, what, about } = event.data;
    try {
      const answer = await engine.answer(what, about);
      scope.postMessage({ number, answer }, buffersOf(answer));
    } catch (problem) {
      scope.postMessage({ number, problem: String(problem) });
    }
  };
  scope.postMessage("ready");
}

/** Columns and pictures are handed over, not copied. */
function buffersOf(message: unknown): Transferable[] {
  const values = message && typeof message === "object" ? Object.values(message) : [];
  return values.filter(ArrayBuffer.isView).map((value) => value.buffer as ArrayBuffer);
}

export async function open(script: string): Promise<Channel> {
  try {
    return await inWorker(script);
  } catch {
    const engine = new Engine();
    return { where: "page", ask: (what, about) => engine.answer(what, about) };
  }
}

async function inWorker(script: string): Promise<Channel> {
  const address = URL.createObjectURL(new Blob([script], { type: "text/javascript" }));
  const worker = new Worker(address);
  const waiting = new Map<number, { done: (answer: never) => void; failed: (e: Error) => void }>();
  let asked = 0;
  await new Promise<void>((ready, failed) => {
    worker.onmessage = () => ready();
    worker.onerror = () => failed(new Error("no worker"));
    setTimeout(() => failed(new Error("no worker")), LONGEST_START_MS);
  });
  URL.revokeObjectURL(address);
  worker.onmessage = (event: MessageEvent<Answer>) => {
    const { number, answer, problem } = event.data;
    const one = waiting.get(number);
    waiting.delete(number);
    if (problem === undefined) one?.done(answer as never);
    else one?.failed(new Error(problem));
  };
  return {
    where: "worker",
    ask: (what, about) =>
      new Promise((done, failed) => {
        const number = ++asked;
        waiting.set(number, { done, failed });
        worker.postMessage({ number, what, about }, buffersOf(about));
      }),
  };
}
