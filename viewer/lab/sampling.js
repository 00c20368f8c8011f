// Sampling: Q prompts in, G completions of each out, as in common/sampling.py.
import { keyed_generator } from "./keyed.js";
import { add_token, empty_tokens } from "./policy.js";
import { END_OF_TURN_ID } from "./tokenizer.js";

const CACHE_SLOTS = 16384; // tokens whose keys and values are in memory at the same time

/**
 * Sample `group_size` completions of every prompt: rows in the order of `prompts`, a group's rows adjacent.
 *
 * `key` is (seed, step): a row's random numbers depend only on it, on the prompt's index and on the completion's index.
 */
export function sample(policy, prompts, group_size, { max_new_tokens, temperature, key, prompt_index, greedy = false }) {
  const per_batch = Math.max(1, Math.floor(CACHE_SLOTS / (group_size * max_new_tokens)));
  const trajectories = [];
  for (let start = 0; start < prompts.length; start += per_batch) {
    const batch = prompts.slice(start, start + per_batch).map((prompt, i) =>
      Array.from({ length: group_size }, (_, completion_index) => {
        const name = { prompt_index: prompt_index[start + i], completion_index };
        return { ...name, prompt, ids: [], sampler_log_probs: [], finish_reason: "length" };
      }),
    );
    const uniforms = new Map();
    for (const row of greedy ? [] : batch.flat())
      uniforms.set(row, keyed_generator("tokens", ...key, row.prompt_index, row.completion_index));
    policy.memory.scope(() => complete(policy, batch, max_new_tokens, temperature, uniforms));
    trajectories.push(...batch.flat());
  }
  return trajectories;
}

/** Append sampled tokens to every row of a batch of groups, until it ends its turn or has used its budget. */
function complete(policy, groups, max_new_tokens, temperature, uniforms) {
  const starts = []; // the slot where a group's prompt begins
  let num_prompt_slots = 0;
  for (const [{ prompt }] of groups) {
    starts.push(num_prompt_slots);
    num_prompt_slots += prompt.length;
  }
  const rows = groups.flatMap((group, q) => group.map((row) => ({ row, q })));
  rows.forEach((entry, b) => (entry.own = num_prompt_slots + b * max_new_tokens)); // the slots of a row's own tokens
  const caches = make_caches(policy, num_prompt_slots + rows.length * max_new_tokens);

  // a prompt is run once; its keys and values serve the group
  const tokens = empty_tokens();
  groups.forEach(([{ prompt }], q) => {
    prompt.forEach((id, position) => add_token(tokens, id, position, starts[q], -1, starts[q], starts[q] + position));
  });
  const ends = groups.map(([{ prompt }], q) => starts[q] + prompt.length - 1);
  policy.memory.scope(() => {
    const probs = policy.next_probs(policy.forward(tokens, caches), ends, temperature);
    for (const { row, q } of rows) append(row, probs[q], uniforms.get(row));
  });
  for (let length = 1; length < max_new_tokens; length++) {
    const active = rows.filter(({ row }) => row.finish_reason !== "stop");
    if (!active.length) break;
    const tokens = empty_tokens();
    for (const { row, q, own } of active) {
      const position = row.prompt.length + length - 1;
      add_token(tokens, row.ids.at(-1), position, starts[q], ends[q] + 1, own, own + length - 1);
    }
    policy.memory.scope(() => {
      const probs = policy.next_probs(policy.forward(tokens, caches), [...active.keys()], temperature);
      active.forEach(({ row }, j) => append(row, probs[j], uniforms.get(row)));
    });
  }
}

/** Draw a row's next token, and record it with its log-prob. */
function append(row, probs, generator) {
  const id = generator ? invert_cdf(probs, generator.random()) : probs.indexOf(Math.max(...probs));
  row.ids.push(id);
  row.sampler_log_probs.push(Math.log(probs[id]));
  if (id === END_OF_TURN_ID) row.finish_reason = "stop";
}

/** The token whose interval contains the uniform number, with the probabilities laid end to end. */
export function invert_cdf(probs, uniform) {
  let total = 0;
  for (const p of probs) total += p;
  let sum = 0;
  for (let id = 0; id < probs.length; id++) if ((sum += probs[id]) > uniform * total) return id;
  return probs.length - 1;
}

/** The keys and values of all layers, by slot. */
function make_caches(policy, slots) {
  const { num_hidden_layers, num_key_value_heads, head_dim } = policy.config;
  const size = num_key_value_heads * head_dim;
  return Array.from({ length: num_hidden_layers }, () => {
    const cache = { k: policy.memory.floats(slots * size), v: policy.memory.floats(slots * size) };
    cache.put = ({ k, v }, at) => {
      at.forEach((slot, i) => {
        cache.k.set(k.subarray(i * size, (i + 1) * size), slot * size);
        cache.v.set(v.subarray(i * size, (i + 1) * size), slot * size);
      });
      return cache;
    };
    return cache;
  });
}
