// A group of completions side by side: its colours, and the token that is chosen in it.

/** The completions of a prompt, side by side. The reader's choice of token is told to `onToken(completion, index)`. */
class GroupView {
  constructor(group, onToken) {
    Object.assign(this, { group, onToken, chosen: null });
    this.rows = group.rows.map(numbersOf);
    this.colors = colorsOf(group.rows);
    this.hasTerms = namesIn(group.rows).includes("terms");
    this.lists = []; // of every list: {list, ids, numbers (null for the prompt), spans}
    fill(byId("group-head"), this.head());
    this.cards = this.rows.map((numbers, rank) => this.card(numbers, rank));
    const list = element("div", { class: `cards${this.cards.length > 16 ? " many" : ""}` }, this.cards);
    this.root = element("div", {}, this.prompt(), list);
    fill(byId("completions"), this.root);
    const options = Object.entries(this.colors).map(([value, { label }]) => element("option", { value }, label));
    fill(byId("color"), options);
    byId("clipped-mark").hidden = !("clipped" in this.colors);
    byId("view").hidden = !group.rows.some((row) => row.turns);
    const withPlace = (handle) => (event) => {
      const span = event.target.closest?.(".token[data-index]");
      if (span) handle({ list: Number(span.parentNode.dataset.list), index: Number(span.dataset.index) }, event);
    };
    const listen = (name, handle) => this.root.addEventListener(name, withPlace(handle));
    listen("pointerover", (place) => this.show(place));
    listen("focusin", (place) => this.choose(place));
    listen("click", (place) => this.choose(place));
    listen("keydown", (place, event) => this.key(place, event));
    this.root.addEventListener("pointerleave", () => this.show(this.chosen));
    this.show(null);
  }

  // ---- the parts of a group

  head() {
    const { question, answer, prompt, rows } = this.group;
    const total = sum(this.rows.flatMap(({ totals }) => totals.terms));
    const isNamed = [prompt, ...rows.map((row) => row.ids)].every((ids) => ids.every((id) => data.tokenTexts[id]));
    const note = [
      answer !== null && ["Answer: ", element("b", {}, shortened(answer, 500)), ". "],
      `${count(rows.length, "completion")}, highest return first. `,
      !isNamed && "The run did not write the text of every token: ‹123› is the token with id 123. ",
      this.hasTerms && ["Their terms add up to ", element("b", { class: "number" }, signed(total, 8)), "."],
    ];
    const title = question ? shortened(question, 2000) : "A prompt without a recorded question";
    return [element("h3", { class: "question" }, title), element("p", { class: "note" }, note)];
  }

  prompt() {
    const { prompt } = this.group;
    const summary = `The prompt: ${count(prompt.length, "token")}, the same for all, not in the loss`;
    const list = this.list("Tokens of the prompt", prompt, null);
    return element("details", { class: "prompt", open: prompt.length <= 120 }, element("summary", {}, summary), list);
  }

  card(numbers, rank) {
    const { row } = numbers;
    const terms = sum(numbers.totals.terms);
    const end = endOf(row);
    const fact = (key, value, name = key) =>
      element("span", { "data-key": key }, `${name} `, element("b", { class: "number" }, value));
    const rewards = Object.entries(row.rewards);
    const facts = [
      !isGiven(row) && fact("advantage", signed(row.advantage, 4)),
      rewards.map(([name, value]) => fact(name, short(value), name.replaceAll("_", " "))),
      fact("length", `${row.sampler.length}`),
      fact("trajectory", `${this.group.prompt.length + row.ids.length}`, row.episode ? "with prompt and world" : row.turns ? "with prompt and tools" : "with prompt"),
      fact("finish_reason", end, "end"),
      this.hasTerms && fact("terms", signed(terms, 8), "sum of terms"),
    ];
    const places = { "data-completion": row.completion_index, "data-rank": rank, "data-sum": terms };
    const returned = element("span", { class: "return" }, fact("return", short(row.return)));
    return element(
      "article",
      { class: "completion", ...places },
      element("h4", {}, `Completion ${row.completion_index}`, returned),
      element("p", { class: "facts" }, facts),
      this.segments(numbers),
      row.turns && conversation(row),
    );
  }

  /** The tokens of a row, cut where the mask changes: what the policy sampled, and what was put between. */
  segments(numbers) {
    const { row } = numbers;
    const list = this.list(`Tokens of completion ${row.completion_index}`, row.ids, numbers);
    const starts = row.mask.flatMap((bit, i) => (i === 0 || bit !== row.mask[i - 1] ? [i] : []));
    if (starts.length < 2 || !row.turns) return list;
    const spans = [...list.children];
    starts.forEach((start, segment) => {
      const length = (starts[segment + 1] ?? row.mask.length) - start;
      const [who, where] = row.mask[start] ? ["policy", "in the loss"] : [row.episode ? "world and template" : "tools and template", "not in the loss"];
      const text = `${who}: ${count(length, "token")} ${where}`;
      spans[start].before(element("span", { class: "segment", role: "presentation", "aria-hidden": "true" }, text));
    });
    return list;
  }

  /** A list of tokens, one of which the tab key reaches; the arrow keys move between them. */
  list(label, ids, numbers) {
    const spans = ids.map((id, index) => tokenSpan(id, index, !numbers?.row.mask[index]));
    const roles = { role: "listbox", "aria-label": label, "aria-orientation": "horizontal" };
    const list = element("div", { class: "tokens", "data-list": this.lists.length, ...roles }, spans);
    this.lists.push({ list, ids, numbers, spans });
    return list;
  }

  /** Show only the completions that pass. */
  filter(passes) {
    this.rows.forEach(({ row }, rank) => (this.cards[rank].hidden = !passes(row)));
  }

  // ---- colours

  /** Colour all tokens by one of `colors`, in a pass over the rollout ("all" of them for terms and pushes). */
  paint({ by: wanted, pass: wantedPass }) {
    const by = Object.hasOwn(this.colors, wanted) ? wanted : "push";
    const kind = this.colors[by];
    byId("color").value = by;
    const pass = this.offerPasses(kind, wantedPass);
    const views = this.rows.map((numbers) => ({ ...numbers, update: numbers.row.updates[pass] ?? null }));
    const values = views.map((view) => view.row.sampler.map((_, i) => kind.value(view, i)));
    const most = kind.scale(values.flat());
    for (const { numbers, spans } of this.lists.filter((list) => list.numbers)) {
      const r = this.rows.indexOf(numbers);
      spans.forEach((span, index) => {
        const i = numbers.action[index];
        if (i === null) return;
        const value = values[r][i];
        span.classList.toggle("below", kind.flipped ? value > 0 : value < 0);
        span.classList.toggle("unknown", !isNumber(value));
        span.classList.toggle("clipped", Boolean(views[r].update?.measurements.clipped?.[i]));
        span.style.setProperty("--strength", isNumber(value) ? Math.min(Math.abs(value) / most, 1).toFixed(3) : "0");
      });
    }
    byId("group").dataset.scale = by === "mask" ? "mask" : kind.diverging ? "diverging" : "sequential";
    const ramp = element("span", { class: `ramp${kind.flipped ? " flipped" : ""}`, "aria-hidden": "true" });
    const ends = kind.ends(most).map((text) => element("span", {}, text));
    const scale = [element("span", { class: "unseen" }, "Scale: "), ends[0], ramp, ends.at(-1)];
    const isKnown = values.flat().some(isNumber);
    fill(byId("scale"), isKnown ? scale : "The run recorded no such numbers for these completions.");
  }

  /** Offer the updates that one can choose from; returns the one that is chosen. */
  offerPasses({ passes, total }, wanted) {
    const all = this.rows.map(({ row }) => row.updates);
    const most = all.reduce((longest, updates) => (updates.length > longest.length ? updates : longest), []);
    const options = most.map(({ epoch }, i) => [String(i), `epoch ${epoch}`]); // one update per row and epoch
    if (total) options.unshift(["all", "all together"]);
    fill(byId("pass"), options.map(([value, text]) => element("option", { value }, text)));
    byId("pass-pair").hidden = most.length < 2 || !passes;
    const chosen = options.some(([value]) => value === wanted) ? wanted : (options[0]?.[0] ?? "0");
    byId("pass").value = chosen;
    return passes ? chosen : "0";
  }

  // ---- choosing a token

  choose(place, told = true) {
    const { list, spans, numbers } = this.lists[place.list];
    this.unselect();
    list.querySelector('[tabindex="0"]').tabIndex = -1;
    spans[place.index].tabIndex = 0;
    spans[place.index].setAttribute("aria-selected", "true");
    this.chosen = place;
    this.show(place);
    if (!told) return;
    byId("token-status").textContent = visible(this.sentence(place));
    this.onToken(numbers && numbers.row.completion_index, numbers && place.index);
  }

  key(place, event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { spans } = this.lists[place.list];
    const last = spans.length - 1;
    const inList = (number, index) => this.lists[number]?.spans[Math.min(index, this.lists[number].spans.length - 1)];
    const moves = {
      ArrowLeft: () => spans[Math.max(place.index - 1, 0)],
      ArrowRight: () => spans[Math.min(place.index + 1, last)],
      ArrowUp: () => inList(place.list - 1, place.index),
      ArrowDown: () => inList(place.list + 1, place.index),
      Home: () => spans[0],
      End: () => spans[last],
      PageUp: () => inList(place.list - 1, place.index),
      PageDown: () => inList(place.list + 1, place.index),
      Escape: () => this.clear(),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]()?.focus();
  }

  /** Choose the token that an address names. */
  select(completion, index) {
    const list = this.lists.findIndex(({ numbers }) => numbers?.row.completion_index === completion);
    if (list >= 0 && this.lists[list].spans[index]) this.choose({ list, index }, false);
  }

  unselect() {
    if (this.chosen) this.lists[this.chosen.list].spans[this.chosen.index].setAttribute("aria-selected", "false");
  }

  /** No token is chosen any more. */
  clear() {
    this.unselect();
    this.chosen = null;
    this.show(null);
    this.onToken(null, null);
  }

  // ---- the facts about a token

  /** Its place, its text, and its numbers where it has some. */
  facts({ list, index }) {
    const { ids, numbers } = this.lists[list];
    const [text, flags] = tokenOf(ids[index]);
    const position = numbers ? this.group.prompt.length + index : index;
    const i = numbers?.action[index] ?? null;
    let role = "not sampled by the policy (a tool's answer or the template): not in the loss";
    if (!numbers) role = "part of the prompt, not in the loss";
    else if (i !== null) {
      const all = count(numbers.row.sampler.length, "token");
      role = `in the loss: number ${i + 1} of ${all} ${isGiven(numbers.row) ? "of the answer" : "that the policy sampled"}`;
    }
    return { id: ids[index], text, flags, numbers, position, i, role };
  }

  sentence(place) {
    const { text, numbers, i, position, role } = this.facts(place);
    const start = `${spoken(text)}, position ${position}, ${role}`;
    if (i === null) return start;
    const logProb = exact(difference(numbers.row.sampler[i], 0));
    const advantage = isGiven(numbers.row) ? "" : `, advantage ${signed(numbers.row.advantage, 4)}`;
    const [push, term] = [numbers.totals.push[i], numbers.totals.terms[i]].map(short);
    return `${start}; log-prob ${logProb}${advantage}, push ${push}, term ${term}`;
  }

  show(place) {
    const how = "To read a token's numbers, point at it, or reach it with the tab key and the arrow keys.";
    if (!place) return fill(byId("readout"), element("p", { class: "note" }, how));
    const facts = this.facts(place);
    const { id, text, flags, numbers, position, role } = facts;
    const looks = `token mark${flags ? " special" : ""}${flags & END_OF_TURN ? " end" : ""}`;
    const named = (key, value) => element("span", {}, `${key} `, element("b", { "data-key": key }, String(value)));
    const which = [
      element("span", { class: looks, "data-key": "text" }, text ? markedText(text) : "empty"),
      named("id", id),
      named("position", position),
      numbers && element("span", {}, `completion ${numbers.row.completion_index}`),
      element("span", { "data-key": "role" }, role),
      element("button", { type: "button", class: "plain", on: { click: () => this.clear() } }, "Close"),
    ];
    fill(byId("readout"), element("div", { class: "which" }, which), facts.i !== null && numberTable(facts));
  }
}

const endOf = (row) => ({ stop: "stopped", length: "cut off" })[row.finish_reason] ?? row.finish_reason ?? "–";

/** The completions of a prompt at another step, as text. */
function otherGroup(step, { rows }) {
  const returns = rows.map((row) => row.return).filter(isNumber);
  const note = `${count(rows.length, "completion")}, mean return ${returns.length ? short(mean(returns)) : "–"}`;
  const card = (row) =>
    element(
      "article",
      { class: "completion" },
      element("h4", {}, `Completion ${row.completion_index}`, element("span", {}, `return ${short(row.return)}`)),
      element("p", { class: "facts" }, `length ${row.sampler.length}, ${endOf(row)}`),
      row.turns ? conversation(row) : element("div", { class: "said" }, shortened(row.text, 20000)),
    );
  return [element("h3", {}, `Step ${step}`), element("p", { class: "note" }, note), ...rows.map(card)];
}

// ---- conversations

const SPEAKERS = { user: "world" }; // after the prompt, only an environment speaks as the user

/** The turns of a row as text: who wrote them, which tool calls they hold, and how much of them is trained. */
function conversation(row) {
  const lengths = (row.mask.join("").match(/1+/g) ?? []).map((run) => run.length);
  const isCounted = row.turns.filter(([role]) => role === "assistant").length === lengths.length;
  const acts = [...(row.episode ?? [])];
  const turns = row.turns.map(([role, text]) => {
    const isPolicy = role === "assistant";
    const act = isPolicy ? acts.shift() : undefined;
    const length = isPolicy && isCounted ? `${count(lengths.shift(), "token")} ` : "";
    const known = `: ${length}${isPolicy ? "in the loss" : "not in the loss"}`;
    const who = element("span", { class: "who" }, element("b", {}, isPolicy ? "policy" : SPEAKERS[role] ?? role), known);
    const said = element("div", { class: "said" }, withCalls(text));
    return element("li", { class: isPolicy ? "turn policy" : "turn tool" }, who, said, act && credit(act));
  });
  return element("ol", { class: "turns" }, turns);
}

/** What a turn in an environment has earned, and what training makes of it. */
function credit({ state, reward, advantage, exact }) {
  const parts = [`in the state ${shortened(state, 200)}`, `reward ${short(reward)}`];
  if (isNumber(advantage)) parts.push(`advantage ${signed(advantage, 3)}`);
  if (isNumber(exact)) parts.push(`exactly ${signed(exact, 3)}`);
  return element("p", { class: "note credit" }, parts.join(", "));
}

/** A text in which calls of tools are set apart. */
function withCalls(text) {
  const parts = shortened(text, 20000).split(/(<tool_call>[\s\S]*?(?:<\/tool_call>|$))/);
  return parts.map((part) => (part.startsWith("<tool_call>") ? element("code", { class: "call" }, part) : part));
}
