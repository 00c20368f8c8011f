// The worker of the page: it answers messages between the steps of a training.
import { Memory, Policy, read_tensors } from "./policy.js";
import { REWARDS, own_reward } from "./rewards.js";
import { sample } from "./sampling.js";
import { END_OF_TURN_ID, Tokenizer } from "./tokenizer.js";
import { DEFAULTS, Training, settings_of } from "./train.js";

const SNAPSHOT_BYTES = 190e6; // of all snapshots together
const EXAMPLE = { text: "<think>20+38=58</think><answer>58</answer>", answer: "58", question: "What is 20 plus 38?" };

let policy, reference, tokenizer, questions, training; // loaded once; a training from each start to the next
let until = 0; // the step after which the worker pauses; 0: it is paused
let snapshots = new Map(); // by step
let stride = 5; // steps between snapshots

const receive = {
  load({ wasm, config, weights, data }) {
    const memory = new Memory(new WebAssembly.Module(wasm));
    policy = new Policy(memory, config, read_tensors(weights));
    policy.prepare_training();
    reference = policy.copy();
    tokenizer = new Tokenizer(data.tokenizer);
    questions = data.questions;
    postMessage({ type: "ready", parameters: policy.size });
  },

  start({ settings }) {
    until = 0;
    training = null; // if these settings cannot be used, there is none
    training = new Training(settings_of(settings), policy, reference, tokenizer, questions, rewards_of(settings));
    training.restore(training.beginning());
    snapshots = new Map();
    stride = 5;
    postMessage({ type: "paused", step: 0 });
  },

  /** Other settings, from the next step on. */
  change({ settings }) {
    training.settings = settings_of({ ...training.settings, ...settings });
    training.reward_all = rewards_of(training.settings);
    postMessage({ type: "changed", settings: training.settings });
  },

  run({ until: last = Infinity }) {
    const is_idle = !until;
    until = last;
    if (is_idle) run_steps();
  },

  pause() {
    if (!until) paused();
    until = 0; // `run_steps` says that it has ended
  },

  step() {
    receive.run({ until: training.num_steps + 1 });
  },

  /** Everything is keyed, so that a step computed again is the same step. */
  rewind({ step }) {
    const wanted = Math.max(0, Math.min(step, training.num_steps));
    const earlier = [...snapshots.keys()].filter((kept) => kept <= wanted);
    training.restore(earlier.length ? snapshots.get(Math.max(...earlier)) : training.beginning());
    for (const kept of snapshots.keys()) if (kept > wanted) snapshots.delete(kept);
    if (training.num_steps === wanted) paused();
    else receive.run({ until: wanted });
  },

  /** The most probable answers, before training and now. */
  ask({ question }) {
    const prompt = tokenizer.encode_prompt(question);
    const { max_new_tokens } = training?.settings ?? DEFAULTS;
    if (prompt.length + max_new_tokens > policy.config.max_position_embeddings)
      throw new Error("The question is too long.");
    const options = { max_new_tokens, temperature: 1, greedy: true, prompt_index: [0] };
    const answer_of = (asked) => ({ text: tokenizer.decode(sample(asked, [prompt], 1, options)[0].ids) });
    postMessage({ type: "answer", question, before: answer_of(reference), now: answer_of(policy) });
  },

  /** The log-probs of a group of the newest step after its update. */
  after({ group }) {
    if (!training?.newest) return;
    const { step, experience } = training.newest;
    const { group_size, temperature } = training.settings;
    const rows = experience.slice(group * group_size, (group + 1) * group_size);
    postMessage({ type: "after", step, group, log_probs: policy.score(rows, temperature).log_probs });
  },

  check({ source }) {
    try {
      const value = own_reward(source)(EXAMPLE.text, EXAMPLE.answer, EXAMPLE.question);
      postMessage({ type: "checked", ok: true, value });
    } catch (error) {
      postMessage({ type: "checked", ok: false, message: error.message });
    }
  },
};

globalThis.onmessage = ({ data: message }) => guarded(() => receive[message.type](message));

/** What goes wrong becomes one sentence for the reader; if it was a step, the training is paused. */
function guarded(work) {
  try {
    work();
  } catch (error) {
    if (work === take_step) until = 0;
    postMessage({ type: "error", message: error.message, step: training?.num_steps ?? 0 });
  }
}

/** A reader's reward may never end: the page watches the time between two messages, and ends the worker. */
function rewards_of({ reward = DEFAULTS.reward, reward_source }) {
  const is_own = reward === "own";
  if (!is_own && !(reward in REWARDS)) throw new Error(`There is no reward ${reward}.`);
  const reward_of = is_own ? own_reward(reward_source) : REWARDS[reward];
  return (rows) => {
    if (is_own) postMessage({ type: "rewards", done: false });
    const totals = rows.map(({ text, answer, question }) => reward_of(text, answer, question));
    if (is_own) postMessage({ type: "rewards", done: true });
    return totals;
  };
}

function paused() {
  postMessage({ type: "paused", step: training.num_steps });
}

/** Steps until a message stops them: each one is a task of its own, so that messages are read in between. */
function run_steps() {
  if (!until || training.num_steps >= until) {
    until = 0;
    paused();
    return;
  }
  guarded(take_step);
}

function take_step() {
  const result = training.train_step();
  postMessage({ type: "step", ...result });
  check_weights(result);
  keep_snapshot();
  const is_default = Object.keys(DEFAULTS).every((key) => training.settings[key] === DEFAULTS[key]);
  if (result.step === 10 && is_default) postMessage({ type: "checksum", step: 10, value: policy.checksum() });
  setTimeout(run_steps);
}

function check_weights({ step, metrics }) {
  const advice = "rewind, or lower the learning rate";
  if (!policy.is_finite()) throw new Error(`The weights are not finite after step ${step}: ${advice}.`);
  if (metrics["loss/skipped"])
    throw new Error(`A gradient of step ${step} is not finite, so it was skipped: ${advice}.`);
}

/** Keep the state of every fifth step; when that is too much memory, of every tenth, and so on. */
function keep_snapshot() {
  if (training.num_steps % stride) return;
  snapshots.set(training.num_steps, training.state());
  const bytes = 4 * policy.size * (3 + training.settings.lag);
  while (snapshots.size * bytes > SNAPSHOT_BYTES) {
    stride *= 2;
    for (const step of snapshots.keys()) if (step % stride) snapshots.delete(step);
  }
}
