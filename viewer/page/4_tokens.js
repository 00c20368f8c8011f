// The look of a token, its possible colours, and its numbers.

const END_OF_TURN = 2; // a flag of a token, beside 1 for a special one
const LONGEST_TOKEN = 200; // characters of a token that are shown

/** A token's [text, flags]; of a token whose text the run did not write there is only the id. */
const tokenOf = (id) => data.tokenTexts[id] ?? [`‹${id}›`, 0];

/** A token's text for labels, where blanks are words. */
const spoken = (text) => shortened(text, 40).replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");

/** Text with marks on its blanks; the marks are drawn by the style sheet, so that the text stays what it is. */
function markedText(text) {
  const names = { " ": "space", "\n": "newline", "\t": "tab" };
  const parts = shortened(text, LONGEST_TOKEN).split(/([ \n\t])/);
  return parts.map((part) => (part in names ? element("span", { class: names[part] }, part) : part));
}

/** A token in a list: only the first one is reached by the tab key, until another one is chosen. */
function tokenSpan(id, index, outside) {
  const [text, flags] = tokenOf(id);
  const looks = {
    special: flags,
    end: flags & END_OF_TURN,
    outside, // of the loss
    flows: text.length > 24 || text.includes("\n"), // others stay in one piece
  };
  const properties = {
    class: ["token", ...Object.keys(looks).filter((look) => looks[look])].join(" "),
    role: "option",
    "aria-selected": "false",
    "aria-label": text.trim() ? null : spoken(text) || "empty",
    tabindex: index ? -1 : 0,
    "data-index": index,
  };
  return element("span", properties, markedText(text));
}

// ---- the numbers of a row

/** (a - b) micro-nats in nats; NaN where one of them is not known. */
const difference = (a, b) => (isNumber(a) && isNumber(b) ? (a - b) * MICRO : NaN);

/** What an update says of action token i under a name; NaN if the run did not write it. */
const numberIn = (update, name, i) => update.measurements[name]?.[i] ?? NaN;

const updatesOf = (rows) => rows.flatMap((row) => row.updates);

/** The names of what the run wrote for each token in each update, in its order: terms, push, and others. */
const namesIn = (rows) => [...new Set(updatesOf(rows).flatMap((update) => Object.keys(update.measurements)))];

/** Whether a row's tokens are those of a file, and nobody sampled them: the sampler's log-probs are the reference's. */
const isGiven = (row) => row.finish_reason === "given";

/** The numbers of a row that do not depend on what is chosen. */
function numbersOf(row) {
  const total = (name) => row.sampler.map((_, i) => sum(row.updates.map((update) => numberIn(update, name, i))));
  let action = 0; // the numbers are lists over action tokens only
  return {
    row,
    totals: { terms: total("terms"), push: total("push") }, // over the updates
    action: row.mask.map((bit) => (bit ? action++ : null)),
  };
}

/**
 * The terms of a step, added up, beside the loss that the run logged: the mean over the step's updates.
 *
 * Returns: {state, sum, logged, updates: [{epoch, minibatch, rows, total}]}.
 */
function checkLoss(groups, logged, complete) {
  const updates = new Map();
  const rows = groups.flatMap((group) => group.rows);
  for (const { epoch, minibatch, measurements } of updatesOf(rows)) {
    const key = `${epoch} ${minibatch}`;
    if (!updates.has(key)) updates.set(key, { epoch, minibatch, rows: 0, total: 0 });
    updates.get(key).rows += 1;
    updates.get(key).total += sum((measurements.terms ?? [NaN]).map((term) => term ?? NaN));
  }
  const inOrder = [...updates.values()].sort((a, b) => a.epoch - b.epoch || a.minibatch - b.minibatch);
  const total = mean(inOrder.map((update) => update.total));
  const tolerance = 1e-5 * Math.max(1, Math.abs(logged)); // the run adds in float32, which has seven digits
  let state = "equal";
  if (!namesIn(rows).includes("terms")) state = "unknown";
  else if (!complete) state = "part";
  else if (!isNumber(total) || !isNumber(logged)) state = "missing";
  else if (Math.abs(total - logged) > tolerance) state = "differs";
  return { state, sum: total, logged, updates: inOrder };
}

// ---- colours

// The possible colours of a token. `value` gives the number of action token i of a row (`update`: of the chosen pass, or
// null), `scale` the number of the strongest colour, given all numbers of the group; diverging scales have two colours.
const COLORS = {
  advantage: {
    label: "advantage",
    diverging: true,
    value: ({ row }) => row.advantage,
    scale: (values) => largest(values.map(Math.abs), 1e-6),
    ends: (most) => [signed(-most, 2), "0", signed(most, 2)],
  },
  sampled: {
    label: "log-prob when sampled",
    value: ({ row }, i) => -difference(row.sampler[i], 0),
    scale: (values) => largest(values, 1),
    ends: (most) => ["0 (certain)", `${short(-Number(most.toFixed(2)))} nats (surprising)`],
  },
  entropy: {
    label: "entropy",
    value: ({ row }, i) => difference(row.entropy?.[i], 0),
    scale: (values) => largest(values, 0.1),
    ends: (most) => ["0 (decided)", `${short(most)} nats (open)`],
  },
  mask: { label: "in the loss or not", value: () => 1, scale: () => 1, ends: () => ["", "in the loss"] },
};

// The same for the known names that updates write: `least` is the least scale, `by` is applied to the numbers.
const UPDATE_COLORS = {
  push: { label: "push: the effect of the update", total: true, words: [" (less probable)", " (more probable)"] },
  terms: { label: "term in the loss", total: true, flipped: true, words: [" (lowers the loss)", " (raises it)"] },
  ratio: {
    label: "probability ratio",
    diverging: true,
    by: Math.log,
    least: 0.1,
    ends: (most) => [Math.exp(-most).toFixed(2), "1", Math.exp(most).toFixed(2)],
  },
  kl: { label: data.titles.kl, least: 1e-4 },
};

/** All possible colours of the tokens of these rows, the push first. */
function colorsOf(rows) {
  const names = [...new Set(["push", "terms", ...namesIn(rows)])];
  const updates = updatesOf(rows);
  const kindOf = (name) => {
    const { by = (x) => x, least = 1e-9, words = ["", ""], total, ...more } = UPDATE_COLORS[name] ?? {};
    const diverging = total || updates.some(({ measurements }) => measurements[name]?.some((value) => value < 0));
    const ends = (most) => [`${short(-most)}${words[0]}`, "0", `${short(most)}${words[1]}`];
    return {
      label: name.replaceAll("_", " "),
      passes: true,
      total,
      diverging,
      value: ({ update, totals }, i) => (update ? by(numberIn(update, name, i)) : (totals[name]?.[i] ?? NaN)),
      scale: (values) => largest(values.map(Math.abs), least),
      ends: (most) => (diverging ? ends(most) : ["0", short(most)]),
      ...more,
    };
  };
  const { advantage, sampled, ...others } = COLORS;
  const known = rows.every(isGiven) ? { sampled: { ...sampled, label: "log-prob of the reference" }, ...others } : COLORS;
  return { ...Object.fromEntries(names.map((name) => [name, kindOf(name)])), ...known };
}

// ---- the numbers of a token

/** All numbers of an action token, and its numbers in each update. */
function numberTable({ numbers, i }) {
  const { row, totals } = numbers;
  const { updates } = row;
  const names = namesIn([row]);
  const number = (name, key, value, more) => {
    const written = [element("span", { "data-key": key }, value), more && element("small", {}, ` ${more}`)];
    return element("div", {}, element("dt", {}, name), element("dd", {}, written));
  };
  const sampled = difference(row.sampler[i], 0);
  const relative = (list) => (list ? sampled + difference(list[i], 0) : NaN); // written as a difference
  const old = row.old ? relative(row.old) : sampled;
  const title = (text) => (updates.length === 1 ? text : `${text}, all updates`);
  const after = difference(row.after?.[i], 0);
  const ofSampler = [
    number("when sampled", "sampler", exact(sampled), `p = ${short(Math.exp(sampled))}`),
    isNumber(after) && number("after this step", "after", exact(after), `p = ${short(Math.exp(after))}`),
    number("old", "old", exact(old)),
  ];
  const facts = [
    isGiven(row) ? number("reference", "sampler", exact(sampled), `p = ${short(Math.exp(sampled))}`) : ofSampler,
    !isGiven(row) && row.old && number("old − when sampled", "difference", signed(old - sampled)),
    !isGiven(row) && number("reference", "ref", exact(relative(row.ref))),
    number("entropy", "entropy", exact(difference(row.entropy?.[i], 0))),
    !isGiven(row) && number("advantage", "advantage", signed(row.advantage)),
    names.includes("terms") && number(title("term in the loss"), "total", signed(totals.terms[i], 9)),
    names.includes("push") && number(title("push"), "push-total", signed(totals.push[i], 9)),
  ];
  const numeral = (name, value) => {
    if (name === "terms" || name === "push") return signed(value, 9);
    return Number.isInteger(value) ? String(value) : exact(value);
  };
  const passes = updates.map((update) => [
    `epoch ${update.epoch}, minibatch ${update.minibatch}`,
    element("span", { "data-key": "log_prob" }, exact(relative(update.log_probs))),
    ...names.map((name) => element("span", { "data-key": name }, numeral(name, numberIn(update, name, i)))),
  ]);
  const meaning = [
    ["When sampled", "as the sampler wrote it down."],
    ["Old", "of the policy before the first update of this step: the denominator of the ratio. The sampler had the same weights, unless it was behind, so only rounding tells the two apart; an engine rounds in its own way."],
    ["Reference", "of the frozen policy of the KL penalty; without one there is none."],
  ];
  const explained = element(
    "details",
    { class: "note" },
    element("summary", {}, "Which log-probs are these?"),
    meaning.map(([name, words]) => element("p", {}, element("b", {}, `${name}: `), words)),
  );
  const unused = "No update used this completion, because its advantage is 0 and there is no KL term.";
  const head = ["update", "log-prob", ...names.map((name) => name.replaceAll("_", " "))];
  return [
    element("dl", { class: "numbers" }, facts),
    !isGiven(row) && explained,
    updates.length ? table("The token in each update", head, passes) : element("p", { class: "note" }, unused),
  ];
}
