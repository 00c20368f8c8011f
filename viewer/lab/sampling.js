// Sampling: Q prompts in, G completions of each out, as in common/sampling.py.
import { keyed_generator } from "./keyed.js";
import { in_groups } from "./policy.js";
import { END_OF_TURN_ID } from "./tokenizer.js";

const CACHE_SLOTS = 16384; // tokens whose keys and values are in memory at the same time

/**
 * Sample `group_size` completions of every prompt: rows in the order of `prompts`, a group's rows adjacent.
 *
 * `key` is (seed, step): a row's random numbers depend only on it, on the prompt's index and on the completion's index.
 */
export function sample(policy, prompts, group_size, options) {
  const { max_new_tokens, temperature, key, prompt_index, greedy = false } = options;
  const groups = prompts.map((prompt, q) =>
    Array.from({ length: group_size }, (_, completion_index) => {
      const name = { prompt_index: prompt_index[q], completion_index };
      return { ...name, prompt, ids: [], sampler_log_probs: [], finish_reason: "length" };
    }),
  );
  const per_batch = Math.max(1, Math.floor(CACHE_SLOTS / (group_size * max_new_tokens)));
  for (const batch of in_groups(groups, per_batch))
    policy.memory.scope(() => complete(policy, batch, max_new_tokens, temperature, greedy ? null : key));
  return groups.flat();
}

/** Append tokens to every row of a batch of groups, until it ends its turn or has used its budget. */
function complete(policy, groups, max_new_tokens, temperature, key) {
  const tokens = []; // of the prompts: each is run once, and its keys and values serve its group
  const rows = groups.flatMap((group) => {
    const [{ prompt }, first] = [group[0], tokens.length];
    tokens.push(...prompt.map((id, position) => [id, position, first, 0, first]));
    return group.map((row) => ({ row, first, end: tokens.length - 1 }));
  });
  rows.forEach((entry, b) => {
    entry.own = tokens.length + b * max_new_tokens; // where the keys of a row's own tokens begin
    entry.generator = key && keyed_generator("tokens", ...key, entry.row.prompt_index, entry.row.completion_index);
  });
  const caches = make_caches(policy, tokens.length + rows.length * max_new_tokens);
  const draw = (tokens, active, indices) =>
    policy.memory.scope(() => {
      const probs = policy.next_probs(tokens, caches, indices, temperature);
      active.forEach(({ row, generator }, j) => append(row, probs[j], generator));
    });
  draw(tokens, rows, rows.map(({ end }) => end));
  for (let length = 1; length < max_new_tokens; length++) {
    const active = rows.filter(({ row }) => row.finish_reason !== "stop");
    if (!active.length) break;
    const newest = active.map(({ row: { ids, prompt }, first, own }) => {
      return [ids.at(-1), prompt.length + length - 1, first, prompt.length, own];
    });
    draw(newest, active, [...active.keys()]);
  }
}

/** Add a row's next token with its log-prob: a drawn one, or the most probable one. */
function append(row, probs, generator) {
  const id = generator ? invert_cdf(probs, generator.random()) : probs.indexOf(Math.max(...probs));
  row.ids.push(id);
  row.sampler_log_probs.push(Math.log(probs[id]));
  if (id === END_OF_TURN_ID) row.finish_reason = "stop";
}

/** The token whose interval contains the uniform number, with the probabilities laid end to end. */
function invert_cdf(probs, uniform) {
  const wanted = uniform * probs.reduce((sum, p) => sum + p, 0);
  let sum = 0;
  const id = probs.findIndex((p) => (sum += p) > wanted);
  return id < 0 ? probs.length - 1 : id;
}

/** The keys and values of all layers, by slot. */
function make_caches(policy, slots) {
  const { num_hidden_layers, num_key_value_heads, head_dim } = policy.config;
  const size = num_key_value_heads * head_dim;
  return Array.from({ length: num_hidden_layers }, () => {
    const cache = { k: policy.memory.floats(slots * size), v: policy.memory.floats(slots * size) };
    cache.put = ({ k, v }, tokens) => {
      tokens.forEach(([, position, , shared, own], i) => {
        cache.k.set(k.subarray(i * size, (i + 1) * size), (own + position - shared) * size);
        cache.v.set(v.subarray(i * size, (i + 1) * size), (own + position - shared) * size);
      });
      return cache;
    };
    return cache;
  });
}
