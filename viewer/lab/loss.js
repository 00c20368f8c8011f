// The algorithms: what their train.py files have in step 3, the advantages, and in `policy_loss`.
//
// Python's autograd computes the gradient of a loss; here each loss returns it, beside the terms:
//
//     push = - d loss / d log_prob,   how the update pushes each token: up if it is positive
//
// A row has arrays over its T tokens after the prompt: ids, action_mask (1 on tokens that count), advantages, and
// old_log_probs and log_probs_ref, which may be null. The gradient of a ratio by its log-prob is the ratio itself.

export const STD_EPS = 1e-4;

// ---- common/advantages.py: `returns` are those of one group

const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

/** A_g = R_g - mean R; exactly 0 if all returns are equal. */
export function group_advantages(returns) {
  const baseline = mean(returns);
  return returns.map((value) => (has_reward_variance(returns) ? value - baseline : 0));
}

/** The standard deviation of a group's returns; the sum of squares is divided by G - 1. */
export function group_std(returns) {
  const center = mean(returns);
  return Math.sqrt(returns.reduce((sum, value) => sum + (value - center) ** 2, 0) / (returns.length - 1));
}

/** The share of a group's completions that succeed, at least STD_EPS; returns below 0 are measured from the lowest. */
export function success_rate(returns) {
  return Math.max(mean(returns) - Math.min(0, ...returns), STD_EPS);
}

export function has_reward_variance(returns) {
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
  const token_loss = ratio.map((r, t) => {
    const clipped = Math.min(Math.max(r, 1 - clip_eps), 1 + clip_eps_high);
    return -Math.min(r * advantages[t], clipped * advantages[t]);
  });
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

// ---- the losses: (settings, log_probs of a row, row, minibatch) -> {terms, push, and what is logged}

/** GRPO: (-min(ratio A, clip(ratio) A) + beta KL) / tokens of its row / num_rows */
function grpo_loss(settings, log_probs, row, minibatch) {
  const ratio = probability_ratio(log_probs, row);
  const { token_loss, slope, clipped } = clipped_surrogate(ratio, row.advantages, settings.clip_eps);
  const by_log_prob = slope.map((s, t) => s * ratio[t]);
  const divisor = row.num_tokens * minibatch.num_rows;
  return with_kl(settings, log_probs, row, minibatch, divisor, token_loss, by_log_prob, { ratio, clipped });
}

/** Dr. GRPO, RLOO: (-min(ratio A, clip(ratio) A) + beta KL) / max_new_tokens / num_rows */
function drgrpo_loss(settings, log_probs, row, minibatch) {
  const ratio = probability_ratio(log_probs, row);
  const { token_loss, slope, clipped } = clipped_surrogate(ratio, row.advantages, settings.clip_eps);
  const by_log_prob = slope.map((s, t) => s * ratio[t]);
  const divisor = settings.max_new_tokens * minibatch.num_rows; // a row's sum / a constant
  return with_kl(settings, log_probs, row, minibatch, divisor, token_loss, by_log_prob, { ratio, clipped });
}

/** GSPO: (-min(s A, clip(s) A) + beta KL) / tokens of its row / num_rows, s = exp(mean of the row's log-ratios) */
function gspo_loss(settings, log_probs, row, minibatch) {
  const token_ratio = probability_ratio(log_probs, row);
  const log_ratio = token_ratio.reduce((sum, r, t) => sum + row.action_mask[t] * Math.log(r), 0) / row.num_tokens;
  const ratio = token_ratio.map(() => Math.exp(log_ratio));
  const { clip_eps, clip_eps_high } = settings;
  const { token_loss, slope, clipped } = clipped_surrogate(ratio, row.advantages, clip_eps, clip_eps_high);
  // each log-prob moves the one ratio of its row, by 1 / tokens
  const total = slope.reduce((sum, s, t) => sum + row.action_mask[t] * s * ratio[t], 0);
  const by_log_prob = slope.map(() => total / row.num_tokens);
  const divisor = row.num_tokens * minibatch.num_rows;
  return with_kl(settings, log_probs, row, minibatch, divisor, token_loss, by_log_prob, { ratio, clipped });
}

/** CISPO: (-stop_gradient(min(ratio, c)) A log p + beta KL) / num_tokens */
function cispo_loss(settings, log_probs, row, minibatch) {
  const ratio = probability_ratio(log_probs, row);
  const by_log_prob = ratio.map((r, t) => -Math.min(r, settings.ratio_cap) * row.advantages[t]);
  const token_loss = by_log_prob.map((s, t) => s * log_probs[t]);
  const capped = ratio.map((r) => r > settings.ratio_cap);
  return with_kl(settings, log_probs, row, minibatch, minibatch.num_tokens, token_loss, by_log_prob, { ratio, capped });
}

/** REINFORCE: -A log p / num_rows */
function reinforce_loss(settings, log_probs, row, minibatch) {
  const by_log_prob = Array.from(row.advantages, (a) => -a);
  const token_loss = by_log_prob.map((s, t) => s * log_probs[t]);
  return with_kl(settings, log_probs, row, minibatch, minibatch.num_rows, token_loss, by_log_prob, {});
}

/** Add beta KL, and divide; tokens that do not count get 0. */
function with_kl(settings, log_probs, row, minibatch, divisor, token_loss, by_log_prob, diagnostics) {
  const terms = token_loss.map((loss, t) => (row.action_mask[t] * loss) / divisor);
  const push = by_log_prob.map((slope, t) => (row.action_mask[t] * -slope) / divisor);
  if (settings.kl_weight > 0) {
    const { kl, slope } = approx_kl_divergence(log_probs, row);
    // the mistake: the penalty is averaged over all entries of the padded batch, with prompts and padding
    const kl_divisor = settings.mistake === "kl_padding" ? minibatch.width * minibatch.num_rows : divisor;
    kl.forEach((value, t) => {
      terms[t] += (settings.kl_weight * value) / kl_divisor;
      push[t] -= (settings.kl_weight * slope[t]) / kl_divisor;
    });
    diagnostics.kl = kl;
  }
  return { terms, push, ...diagnostics };
}

// ---- the menu: for each algorithm its train.py, the advantages of a group, the loss, and its own defaults

const SEVERAL_UPDATES = { epochs_per_step: 4, minibatch_size: 32, kl_weight: 0 };
const ONE_UPDATE = { epochs_per_step: 1, minibatch_size: null, kl_weight: 0, max_grad_norm: Infinity };
const in_units_of = (spread) => (returns) => group_advantages(returns).map((a) => a / spread(returns));
const grpo_advantages = in_units_of((returns) => group_std(returns) + STD_EPS);
const minus_baseline = (returns, { baseline }) => returns.map((r) => Math.fround(r - Math.fround(baseline)));

export const ALGORITHMS = {
  reinforce: {
    train: "policy_gradients/reinforce/train.py",
    advantages: minus_baseline, // which stays 0
    policy_loss: reinforce_loss,
    fixed: ONE_UPDATE,
  },
  reinforce_baseline: {
    train: "policy_gradients/reinforce/train.py",
    advantages: minus_baseline, // a running mean of earlier rewards
    policy_loss: reinforce_loss,
    fixed: ONE_UPDATE,
  },
  grpo: { train: "experiment_base/train.py", advantages: grpo_advantages, policy_loss: grpo_loss },
  drgrpo: { train: "experiment_drgrpo/train.py", advantages: group_advantages, policy_loss: drgrpo_loss },
  rloo: {
    train: "policy_gradients/rloo/train.py",
    advantages: (returns) => group_advantages(returns).map((a) => (a * returns.length) / (returns.length - 1)),
    policy_loss: drgrpo_loss,
  },
  maxrl: {
    train: "policy_gradients/maxrl/train.py",
    advantages: in_units_of(success_rate),
    policy_loss: grpo_loss,
  },
  gspo: {
    train: "policy_gradients/gspo/train.py",
    advantages: grpo_advantages,
    policy_loss: gspo_loss,
    defaults: { ...SEVERAL_UPDATES, clip_eps: 3e-4, clip_eps_high: 4e-4 },
  },
  cispo: {
    train: "policy_gradients/cispo/train.py",
    advantages: grpo_advantages,
    policy_loss: cispo_loss,
    defaults: { ...SEVERAL_UPDATES, ratio_cap: 1.28 },
  },
};
