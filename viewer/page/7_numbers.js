// The numbers of a token and how they make its term in the loss; the turns of a conversation.

/** All numbers of an action token, and how its term comes about in each update. */
function numberTable({ numbers, i }) {
  const { row, updates, total } = numbers;
  const { loss } = data;
  const number = (name, key, value, more) =>
    element(
      "div",
      {},
      element("dt", {}, name),
      element("dd", {}, element("span", { "data-key": key }, value), more && element("small", {}, ` ${more}`)),
    );
  const sampled = difference(row.sampler[i], 0);
  const relative = (list) =>
    list ? (isNumber(list[i]) && isNumber(row.sampler[i]) ? (row.sampler[i] + list[i]) * MICRO : NaN) : NaN;
  const old = row.old ? relative(row.old) : sampled;
  const weight = weightsOf(row)?.[i];
  const product = isNumber(row.advantage) ? row.advantage * weight : NaN;
  // of a row without updates whose old log-probs were not written, those of the trainer are not known
  const apart = row.old || updates.length ? old - sampled : NaN;
  const one = updates.length === 1;
  const passes = updates.map((update, pass) =>
    element(
      "tr",
      { "data-pass": pass },
      element("th", { scope: "row" }, `epoch ${update.epoch}, minibatch ${update.minibatch}`),
      [
        ["log_prob", exact(update.logProb[i])],
        ["ratio", exact(update.ratio[i])],
        ["clipped", update.clipped[i] ? "yes" : "no"],
        ["kl", exact(update.kl[i])],
        ["term", signed(update.term[i], 9)],
      ].map(([key, value]) => element("td", { "data-key": key }, value)),
      element("td", { class: "how" }, worked(row, update, i)),
    ),
  );
  const heads = ["update", "log-prob", "ratio", "clipped", "KL (k3)", "term", "how"];
  return [
    element(
      "dl",
      { class: "numbers" },
      number("when sampled", "sampler", exact(sampled), `p = ${short(Math.exp(sampled))}`),
      number("old", "old", exact(old)),
      row.weights && number("old − when sampled", "difference", signed(apart), "trainer against engine"),
      number("reference", "ref", exact(relative(row.ref))),
      number("entropy", "entropy", row.entropy ? exact(difference(row.entropy[i], 0)) : "–"),
      number("advantage", "advantage", signed(row.advantage)),
      row.weights && number("importance weight", "weight", exact(weight), `× advantage = ${signed(product)}`),
      number("mask", "mask", "1"),
      loss.kind && number(one ? "term in the loss" : "terms, mean over all updates", "total", signed(total[i], 9)),
    ),
    updates.length
      ? element(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "The token in each update" },
          element(
            "table",
            {},
            element(
              "thead",
              {},
              element(
                "tr",
                {},
                heads.map((text) => element("th", { scope: "col" }, text)),
              ),
            ),
            element("tbody", {}, passes),
          ),
        )
      : element(
          "p",
          { class: "note" },
          "No update used this completion (its advantage is 0, and there is no KL term): it adds nothing to the loss.",
        ),
  ];
}

/** A term as a calculation that one can do again. */
function worked(row, update, i) {
  const { loss } = data;
  if (!loss.kind) return "not known for this experiment";
  const penalty = loss.kl_weight > 0 ? ` + ${loss.kl_weight} × ${exact(update.kl[i])}` : "";
  return `(${signed(update.surrogate[i])}${penalty}) / ${denominator(row, loss)} / ${update.rows}`;
}

// ---- conversations

/** The turns of a row as text: who wrote them, which tool calls they hold, and how much of them is trained. */
function conversation(row) {
  const lengths =
    row.mask
      .join("")
      .match(/1+/g)
      ?.map((run) => run.length) ?? [];
  const ours = row.turns.filter(([role]) => role === "assistant").length;
  let turn = 0;
  return element(
    "ol",
    { class: "turns" },
    row.turns.map(([role, text]) => {
      const policy = role === "assistant";
      const known =
        policy && ours === lengths.length
          ? `: ${count(lengths[turn++], "token")} in the loss`
          : policy
            ? ": in the loss"
            : ": not in the loss";
      const name = policy ? "policy" : role;
      return element(
        "li",
        { class: policy ? "turn policy" : "turn tool", "data-role": role },
        element("span", { class: "who" }, element("b", {}, name), known),
        element("div", { class: "said" }, withCalls(text)),
      );
    }),
  );
}

/** A text in which calls of tools are set apart. */
function withCalls(text) {
  return shortened(text, 20000)
    .split(/(<tool_call>[\s\S]*?(?:<\/tool_call>|$))/)
    .map((part) => (part.startsWith("<tool_call>") ? element("code", { class: "call" }, part) : part));
}
