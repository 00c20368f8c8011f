// The algorithms: what their train.py files have in step 3, the advantages, and in `policy_loss`.
//
// Python's autograd computes the gradient of a loss; here each loss returns it, beside the terms:
//
//     push = - d loss / d log_prob,   how the update pushes each token: up if it is positive
//
// A row has arrays over its T tokens after the prompt: ids, action_mask (1 on tokens that count), advantages, and
// old_log_probs and log_probs_ref, which may be null. The gradient of a ratio by its log-prob is the ratio itself.

const STD_EPS = 1e-4;

export const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

// ---- common/advantages.py: `returns` are those of one group

/** A_g = R_g - mean R; exactly 0 if all returns are equal. */
function group_advantages(returns) {
  const baseline = mean(returns);
  return returns.map((value) => (has_reward_variance(returns) ? value - baseline : 0));
}

/** The standard deviation of a group's returns; the sum of squares is divided by G - 1. */
function group_std(returns) {
  const center = mean(returns);
  return Math.sqrt(returns.reduce((sum, value) => sum + (value - center) ** 2, 0) / (returns.length - 1));
}

/** The share of a group's completions that succeed, at least STD_EPS; returns below 0 are measured from the lowest. */
function success_rate(returns) {
  return Math.max(mean(returns) - Math.min(0, ...returns), STD_EPS);
}

function has_reward_variance(returns) {
  const [lowest, highest] = [Math.min(...returns), Math.max(...returns)];
  return !(highest - lowest <= 1e-6 * Math.max(1, Math.abs(lowest), Math.abs(highest)));
}

// ---- common/loss.py: arrays over the tokens of a row

/** p(token) / p_old(token); 1 if the policy is still the one that sampled. */
function probability_ratio(log_probs, { old_log_probs, action_mask }) {
  return Array.from(log_probs, (log_prob, t) =>
    old_log_probs && action_mask[t] ? Math.exp(log_prob - old_log_probs[t]) : 1,
  );
}

/** -min(ratio A, clip(ratio, 1 - clip_eps, 1 + clip_eps_high) A) of every token, and the slope by its ratio. */
function clipped_surrogate(ratio, advantages, clip_eps, clip_eps_high = clip_eps) {
  const clip = (r) => Math.min(Math.max(r, 1 - clip_eps), 1 + clip_eps_high);
  const token_loss = ratio.map((r, t) => -Math.min(r * advantages[t], clip(r) * advantages[t]));
  const clipped = is_clipped(ratio, advantages, clip_eps, clip_eps_high);
  const slope = ratio.map((_, t) => (clipped[t] ? 0 : -advantages[t]));
  return { token_loss, slope, clipped };
}

/** Which tokens have no gradient in `clipped_surrogate`. */
function is_clipped(ratio, advantages, clip_eps, clip_eps_high) {
  return ratio.map((r, t) => (r > 1 + clip_eps_high && advantages[t] > 0) || (r < 1 - clip_eps && advantages[t] < 0));
}

/** k3 = r - log r - 1, r = p_ref(token) / p(token): an estimate of KL(policy || reference); and its slope, 1 - r. */
function approx_kl_divergence(log_probs, { log_probs_ref, action_mask }) {
  const log_r = Array.from(log_probs, (log_prob, t) => (action_mask[t] ? log_probs_ref[t] - log_prob : 0));
  return { kl: log_r.map((x) => Math.expm1(x) - x), slope: log_r.map((x) => -Math.expm1(x)) };
}

// ---- the losses: (settings, log_probs of a row, row, minibatch) -> what differs between the train.py files: each
// token's loss and its slope by the log-prob, what both are divided by, and what is logged

/** -min(ratio A, clip(ratio) A), the ratio of each token */
function clipped_loss({ clip_eps }, log_probs, row) {
  const ratio = probability_ratio(log_probs, row);
  const { token_loss, slope, clipped } = clipped_surrogate(ratio, row.advantages, clip_eps);
  return { token_loss, slope: slope.map((s, t) => s * ratio[t]), ratio, clipped };
}

/** GRPO, MaxRL: / tokens of its row / num_rows */
function grpo_loss(settings, log_probs, row, { num_rows }) {
  return { ...clipped_loss(settings, log_probs, row), divisor: row.num_tokens * num_rows };
}

/** Dr. GRPO, RLOO: / max_new_tokens / num_rows, so that a row's sum is divided by a constant */
function drgrpo_loss(settings, log_probs, row, { num_rows }) {
  return { ...clipped_loss(settings, log_probs, row), divisor: settings.max_new_tokens * num_rows };
}

/** GSPO: -min(s A, clip(s) A) / tokens of its row / num_rows, s = exp(mean of the row's log-ratios) */
function gspo_loss({ clip_eps, clip_eps_high }, log_probs, row, { num_rows }) {
  const mean_of_row = (values) => values.reduce((sum, x, t) => sum + row.action_mask[t] * x, 0) / row.num_tokens;
  const s = Math.exp(mean_of_row(probability_ratio(log_probs, row).map(Math.log)));
  const ratio = row.ids.map(() => s);
  const { token_loss, slope, clipped } = clipped_surrogate(ratio, row.advantages, clip_eps, clip_eps_high);
  const of_each = mean_of_row(slope.map((x) => x * s)); // each log-prob moves the one ratio, by 1 / tokens
  return { token_loss, slope: slope.map(() => of_each), divisor: row.num_tokens * num_rows, ratio, clipped };
}

/** CISPO: -stop_gradient(min(ratio, c)) A log p / num_tokens */
function cispo_loss({ ratio_cap }, log_probs, row, { num_tokens }) {
  const ratio = probability_ratio(log_probs, row);
  const slope = ratio.map((r, t) => -Math.min(r, ratio_cap) * row.advantages[t]);
  const token_loss = slope.map((s, t) => s * log_probs[t]);
  return { token_loss, slope, divisor: num_tokens, ratio, capped: ratio.map((r) => r > ratio_cap) };
}

/** REINFORCE: -A log p / num_rows */
function reinforce_loss(settings, log_probs, row, { num_rows }) {
  const slope = row.advantages.map((a) => -a);
  return { token_loss: slope.map((s, t) => s * log_probs[t]), slope, divisor: num_rows };
}

/** Each token's term and push, with beta KL; tokens that do not count get 0. */
export function policy_loss(settings, log_probs, row, minibatch) {
  const algorithm = ALGORITHMS[settings.algorithm];
  const { token_loss, slope, divisor, ...diagnostics } = algorithm.loss(settings, log_probs, row, minibatch);
  const terms = token_loss.map((loss, t) => (row.action_mask[t] * loss) / divisor);
  const push = slope.map((s, t) => (row.action_mask[t] * -s) / divisor);
  if (settings.kl_weight > 0) {
    const { kl, slope: kl_slope } = approx_kl_divergence(log_probs, row);
    // the mistake: the penalty is averaged over all entries of the padded batch, with prompts and padding
    const kl_divisor = settings.mistake === "kl_padding" ? minibatch.width * minibatch.num_rows : divisor;
    kl.forEach((value, t) => {
      terms[t] += (settings.kl_weight * value) / kl_divisor;
      push[t] -= (settings.kl_weight * kl_slope[t]) / kl_divisor;
    });
    diagnostics.kl = kl;
  }
  return { terms, push, ...diagnostics };
}

// ---- the menu: for each algorithm the advantages of a group, the loss, and its train.py's own defaults

const SEVERAL_UPDATES = { epochs_per_step: 4, minibatch_size: 32, kl_weight: 0 };
const in_units_of = (spread) => (returns) => group_advantages(returns).map((a) => a / spread(returns));
const grpo_advantages = in_units_of((returns) => group_std(returns) + STD_EPS);
const rloo_advantages = (returns) => group_advantages(returns).map((a) => (a * returns.length) / (returns.length - 1));
const reinforce = {
  advantages: (returns, baseline) => returns.map((r) => Math.fround(r - Math.fround(baseline))),
  loss: reinforce_loss,
  fixed: { epochs_per_step: 1, minibatch_size: null, kl_weight: 0, max_grad_norm: Infinity },
};

export const ALGORITHMS = {
  reinforce, // its baseline stays 0
  reinforce_baseline: reinforce, // a running mean of earlier rewards
  grpo: { advantages: grpo_advantages, loss: grpo_loss },
  drgrpo: { advantages: group_advantages, loss: drgrpo_loss },
  rloo: { advantages: rloo_advantages, loss: drgrpo_loss },
  maxrl: { advantages: in_units_of(success_rate), loss: grpo_loss },
  gspo: {
    advantages: grpo_advantages,
    loss: gspo_loss,
    defaults: { ...SEVERAL_UPDATES, clip_eps: 3e-4, clip_eps_high: 4e-4 },
  },
  cispo: { advantages: grpo_advantages, loss: cispo_loss, defaults: { ...SEVERAL_UPDATES, ratio_cap: 1.28 } },
};
