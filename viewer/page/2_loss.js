// A token's term in the loss, computed from what the run wrote of it. Pure functions: numbers in, numbers out.
//
//     ratio     = p(token) / p_old(token)
//     A         = advantage of the row, times the token's importance weight where the run wrote one
//     surrogate = -min(ratio A, clip(ratio, 1 - clip_eps, 1 + clip_eps) A)
//     kl        = r - log r - 1,   r = p_ref(token) / p(token)                                  (k3)
//     term      = (surrogate + kl_weight kl) / tokens / rows
//
// `tokens` is the number of the row's action tokens (grpo) or the completion budget (drgrpo), `rows` that of the update.
// The loss of an update is the sum over its rows and tokens; the run logs the mean over the step's updates.

/** Rows in minibatch number `minibatch` of a rollout: the last one may be smaller. */
const rowsOfUpdate = (loss, minibatch) => Math.min(loss.minibatch_size, loss.rows - minibatch * loss.minibatch_size);

/** Updates per step: passes over the rollout times minibatches. */
const updatesPerStep = (loss) => loss.epochs * Math.ceil(loss.rows / loss.minibatch_size);

const actionTokens = (row) => row.mask.filter(Boolean).length;

/** What the sum over a row's tokens is divided by. */
const denominator = (row, loss) => (loss.kind === "drgrpo" ? loss.budget : actionTokens(row));

/** (a - b) micro-nats in nats; NaN where one of them is not known. */
const difference = (a, b) => (isNumber(a) && isNumber(b) ? (a - b) * MICRO : NaN);

/** Importance weights of a row's action tokens; null if the run has none. NaN where the run wrote no finite number. */
const weightsOf = (row) => row.weights?.map((value) => difference(value, 0)) ?? null;

/**
 * All numbers of a row's action tokens, in order, in each update that used the row.
 *
 * Returns: [{epoch, minibatch, rows, logProb: [], ratio: [], clipped: [], surrogate: [], kl: [], term: []}], a number per
 * action token in each list. NaN where the run wrote no finite number, and for every term if the loss is not known.
 */
function tokenTerms(row, loss) {
  const ofRow = isNumber(row.advantage) ? row.advantage : NaN;
  const weights = weightsOf(row);
  const advantage = row.sampler.map((_, i) => (weights ? ofRow * weights[i] : ofRow));
  const zeros = row.sampler.map(() => 0);
  const old = row.old ?? zeros; // all numbers of a row are written as differences to those of the sampler
  const reference = row.ref ?? zeros.map(() => null);
  const divisor = denominator(row, loss); // once per row: completions can have thousands of tokens
  return row.updates.map(({ epoch, minibatch, log_probs: now }) => {
    const rows = rowsOfUpdate(loss, minibatch);
    const logProb = now.map((value, i) =>
      isNumber(value) && isNumber(row.sampler[i]) ? (row.sampler[i] + value) * MICRO : NaN,
    );
    const ratio = now.map((value, i) => Math.exp(difference(value, old[i])));
    const limited = ratio.map((value) => Math.min(Math.max(value, 1 - loss.clip_eps), 1 + loss.clip_eps));
    const surrogate = ratio.map((value, i) => -Math.min(value * advantage[i], limited[i] * advantage[i]));
    // without a policy gradient: the limited ratio is the smaller objective, and it does not move with the policy
    const clipped = ratio.map((value, i) => limited[i] !== value && limited[i] * advantage[i] < value * advantage[i]);
    const kl = now.map((value, i) => difference(reference[i], value)).map((logR) => Math.expm1(logR) - logR);
    const penalty = (i) => (loss.kl_weight > 0 ? loss.kl_weight * kl[i] : 0);
    const term = surrogate.map((value, i) => (value + penalty(i)) / divisor / rows);
    return {
      epoch,
      minibatch,
      rows,
      logProb,
      ratio,
      clipped,
      surrogate,
      kl,
      term: loss.kind ? term : term.map(() => NaN),
    };
  });
}

/** What each action token of a row adds to the loss that is logged: its terms in all updates, divided by their number. */
function totalTerms(row, loss, updates = tokenTerms(row, loss)) {
  return row.sampler.map((_, i) => sum(updates.map((update) => update.term[i])) / updatesPerStep(loss));
}

/** What a row, or a group of rows, adds to the loss that is logged. */
const rowLoss = (row, loss) => sum(totalTerms(row, loss));
const groupLoss = (group, loss) => sum(group.rows.map((row) => rowLoss(row, loss)));

/**
 * The terms of a step, added up.
 *
 * Returns: {total, updates: [{epoch, minibatch, rows, total}]}; `total` is to be compared with the logged loss.
 */
function stepLoss(groups, loss) {
  const rows = groups.flatMap((group) => group.rows);
  const updates = new Map();
  for (const update of rows.flatMap((row) => tokenTerms(row, loss))) {
    const key = `${update.epoch} ${update.minibatch}`;
    if (!updates.has(key)) updates.set(key, { epoch: update.epoch, minibatch: update.minibatch, rows: 0, total: 0 });
    updates.get(key).rows += 1;
    updates.get(key).total += sum(update.term);
  }
  const inOrder = [...updates.values()].sort((a, b) => a.epoch - b.epoch || a.minibatch - b.minibatch);
  const total = loss.kind ? sum(inOrder.map((update) => update.total)) / updatesPerStep(loss) : NaN;
  return { total, updates: inOrder };
}

/** How the terms of a step compare with the loss that the run logged: {state, sum, logged}. */
function checkLoss(groups, loss, logged, complete) {
  const tolerance = 1e-5 * Math.max(1, Math.abs(logged)); // the run adds in float32, which has seven digits
  const { total } = stepLoss(groups, loss);
  let state = "equal";
  if (!loss.kind) state = "unknown";
  else if (!complete) state = "part";
  else if (!isNumber(total) || !isNumber(logged)) state = "missing";
  else if (Math.abs(total - logged) > tolerance) state = "differs";
  return { state, sum: total, logged };
}
