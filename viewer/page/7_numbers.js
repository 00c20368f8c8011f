// The numbers of a token; the turns of a conversation.

/** All numbers of an action token, and those of each update. */
function numberTable({ numbers, i }) {
  const { row, totals } = numbers;
  const { updates } = row;
  const number = (name, key, value, more) => {
    const written = [element("span", { "data-key": key }, value), more && element("small", {}, ` ${more}`)];
    return element("div", {}, element("dt", {}, name), element("dd", {}, written));
  };
  const sampled = difference(row.sampler[i], 0);
  const relative = (list) => (list ? sampled + difference(list[i], 0) : NaN); // written as a difference
  const old = row.old ? relative(row.old) : sampled;
  const names = namesIn([row]);
  const plain = (value) => (Number.isInteger(value) ? String(value) : exact(value));
  const numeral = (name, value) => (["terms", "push"].includes(name) ? signed(value, 9) : plain(value));
  const title = (text) => (updates.length === 1 ? text : `${text}, all updates`);
  const passes = updates.map((update, pass) => [
    element("span", { "data-pass": pass }, `epoch ${update.epoch}, minibatch ${update.minibatch}`),
    element("span", { "data-key": "log_prob" }, exact(relative(update.log_probs))),
    ...names.map((name) => element("span", { "data-key": name }, numeral(name, numberIn(update, name, i)))),
  ]);
  const facts = [
    number("when sampled", "sampler", exact(sampled), `p = ${short(Math.exp(sampled))}`),
    number("old", "old", exact(old)),
    row.old && number("old − when sampled", "difference", signed(old - sampled)),
    number("reference", "ref", exact(relative(row.ref))),
    number("entropy", "entropy", row.entropy ? exact(difference(row.entropy[i], 0)) : "–"),
    number("advantage", "advantage", signed(row.advantage)),
    names.includes("terms") && number(title("term in the loss"), "total", signed(totals.terms[i], 9)),
    names.includes("push") && number(title("push"), "push-total", signed(totals.push[i], 9)),
  ];
  const unused = "No update used this completion, because its advantage is 0 and there is no KL term.";
  const head = ["update", "log-prob", ...names.map((name) => name.replaceAll("_", " "))];
  return [
    element("dl", { class: "numbers" }, facts),
    updates.length ? table("The token in each update", head, passes) : element("p", { class: "note" }, unused),
  ];
}

// ---- conversations

/** The turns of a row as text: who wrote them, which tool calls they hold, and how much of them is trained. */
function conversation(row) {
  const lengths = (row.mask.join("").match(/1+/g) ?? []).map((run) => run.length);
  const ours = row.turns.filter(([role]) => role === "assistant").length;
  let turn = 0;
  return element(
    "ol",
    { class: "turns" },
    row.turns.map(([role, text]) => {
      const policy = role === "assistant";
      const length = policy && ours === lengths.length ? `${count(lengths[turn++], "token")} ` : "";
      const known = `: ${length}${policy ? "in the loss" : "not in the loss"}`;
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
