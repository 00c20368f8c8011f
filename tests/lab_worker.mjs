// node --expose-gc lab_worker.mjs FOLDER: sends messages to the laboratory's worker, and prints what came of them.
import fs from "node:fs";
import { pathToFileURL } from "node:url";

const folder = process.argv[2];
let posted = [];
let waiting = () => {};
globalThis.postMessage = (message) => {
  posted.push(message);
  waiting();
};
const lab = await import(pathToFileURL(`${folder}/lab.mjs`));
const { loaded, settings } = JSON.parse(fs.readFileSync(`${folder}/input.json`));
const bytes = (text) => new Uint8Array(Buffer.from(text, "base64"));

/** Send a message, and wait for an answer of one of the types. */
async function send(message, ...types) {
  posted = [];
  globalThis.onmessage({ data: message });
  const answer = () => posted.find(({ type }) => types.includes(type));
  while (!answer()) await new Promise((resolve) => (waiting = resolve));
  return answer();
}
const newest = () => JSON.stringify(posted.findLast(({ type }) => type === "step").groups);
const out = { errors: [], answers: [] };

await send({ type: "load", ...loaded, wasm: bytes(loaded.wasm), weights: bytes(loaded.weights).buffer }, "ready");
await send({ type: "start", settings }, "paused");
await send({ type: "run", until: 7 }, "paused");
out.first = newest();
await send({ type: "rewind", step: 6 }, "paused");
await send({ type: "step" }, "paused");
out.again = newest();
const one = await send({ type: "after", group: 1 }, "after");
const two = await send({ type: "after", group: 1 }, "after");
out.after = Math.max(...one.log_probs[0].map((x, t) => Math.abs(x - two.log_probs[0][t])));
await send({ type: "rewind", step: 4 }, "paused");
await send({ type: "change", settings: { lr: 1e-3 } }, "changed");
await send({ type: "run", until: 7 }, "paused");
out.changed = newest();
const answer = await send({ type: "ask", question: "What is 20 plus 38?" }, "answer");
out.answers = [answer.before.text, answer.now.text];

const error_of = async (wrong) => (await send({ type: "start", settings: { ...settings, ...wrong } }, "error")).message;
out.errors.push(await error_of({ lr: NaN }), await error_of({ minibatch_size: 6 }), await error_of({ algorithm: "x" }));
for (const source of ["return 'x'", "throw new Error('nothing is defined here')", "return ("])
  out.errors.push((await send({ type: "check", source }, "checked")).message);
await send({ type: "start", settings: { ...settings, lr: 1e38 } }, "paused");
out.errors.push((await send({ type: "run", until: 9 }, "error")).message);

const used = () => (gc(), process.memoryUsage().heapUsed);
await send({ type: "start", settings: { ...settings, max_new_tokens: 2, prompts_per_step: 1 } }, "paused");
await send({ type: "run", until: 20 }, "paused");
const before = used();
await send({ type: "run", until: 60 }, "paused");
posted = [];
out.growth = used() - before;
console.log(JSON.stringify(out));
