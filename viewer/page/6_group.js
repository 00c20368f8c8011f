// A group of completions side by side: its colours, and the token that is chosen in it.

/** The completions of a prompt, side by side. The reader's choice of token is told to `onToken(completion, index)`. */
class GroupView {
  constructor(group, { onToken, onColor }) {
    this.group = group;
    this.onToken = onToken;
    this.onColor = onColor;
    this.rows = group.rows.map(numbersOf);
    this.colors = colorsOf(group.rows);
    this.hasTerms = namesIn(group.rows).includes("terms");
    this.readout = element("aside", { id: "readout", "aria-label": "The chosen token", class: "screen-only" });
    this.spoken = element("p", { class: "unseen", "aria-live": "polite", id: "token-status" });
    this.tokens = []; // of every list: {list, numbers or null for the prompt, spans}
    this.root = element(
      "div",
      { class: "group" },
      this.head(),
      this.controls(),
      this.prompt(),
      this.cards(),
      this.readout,
      this.spoken,
    );
    this.root.addEventListener("pointerover", (event) => this.hover(event));
    this.root.addEventListener("focusin", (event) => this.focus(event));
    this.root.addEventListener("click", (event) => this.focus(event));
    this.root.addEventListener("keydown", (event) => this.key(event));
    this.root.addEventListener("pointerleave", () => this.show(this.chosen));
    this.show(null);
  }

  head() {
    const { question, answer, rows } = this.group;
    const total = sum(this.rows.flatMap(({ totals }) => totals.terms));
    return [
      element(
        "h3",
        { class: "question" },
        question ? shortened(question, 2000) : "A prompt without a written question",
      ),
      element(
        "p",
        { class: "note", id: "group-sum", "data-sum": total },
        answer === null || answer === undefined
          ? ""
          : ["Answer: ", element("b", {}, shortened(String(answer), 500)), ". "],
        `${count(rows.length, "completion")}, highest return first. `,
        this.unnamed() ? "The run did not write the text of every token: ‹123› is the token with id 123. " : "",
        this.hasTerms ? ["Their terms add up to ", element("b", { class: "number" }, signed(total, 8)), "."] : "",
      ),
    ];
  }

  /** Whether there are tokens of which only the id is known. */
  unnamed() {
    return [this.group.prompt ?? [], ...this.group.rows.map((row) => row.ids ?? [])].some((ids) =>
      ids.some((id) => !data.tokens[id]),
    );
  }

  controls() {
    const choice = (id, label, options) => [element("label", { for: id }, label), element("select", { id }, options)];
    const option = (value, text) => element("option", { value }, text);
    const colors = Object.entries(this.colors).map(([name, { label }]) => option(name, label));
    this.legend = element("div", { id: "scale", class: "scale" });
    const marks = [
      ["token outside", "not in the loss"],
      ["token special", "special"],
      ["token special end", "end of turn"],
      "clipped" in this.colors && ["token clipped", "clipped: no gradient"],
    ];
    const bar = element(
      "div",
      { class: "bar colors" },
      element("span", { class: "pair" }, choice("color", "Colour", colors)),
      element("span", { class: "pair", id: "pass-pair" }, choice("pass", "Update in", [])),
      this.legend,
      element(
        "span",
        { class: "marks" },
        marks.filter(Boolean).map(([name, text]) => element("span", { class: `${name} mark` }, text)),
      ),
      this.rows.some(({ row }) => row.turns) && this.viewSwitch(),
    );
    bar.addEventListener("change", ({ target }) => {
      if (target.id === "color") this.onColor({ by: target.value });
      if (target.id === "pass") this.onColor({ pass: target.value });
    });
    return bar;
  }

  viewSwitch() {
    const radio = (value, text, checked) => {
      const on = { change: () => (this.root.dataset.view = value) };
      return element("label", {}, element("input", { type: "radio", name: "view", value, checked, on }), text);
    };
    const legend = element("legend", { class: "unseen" }, "Show");
    const choices = [radio("tokens", "tokens", true), radio("turns", "conversation", false)];
    return element("fieldset", { class: "pair view" }, legend, choices);
  }

  prompt() {
    const { prompt } = this.group;
    if (!prompt?.length) return element("p", { class: "note" }, "The tokens of the prompt were not written.");
    const list = this.list("Tokens of the prompt", prompt, null, "prompt");
    return element(
      "details",
      { class: "prompt", open: prompt.length <= 120 },
      element("summary", {}, `The prompt: ${count(prompt.length, "token")}, the same for all, not in the loss`),
      list,
    );
  }

  cards() {
    return element(
      "div",
      { class: `cards${this.rows.length > 16 ? " many" : ""}` },
      this.rows.map((numbers, rank) => this.card(numbers, rank)),
    );
  }

  card(numbers, rank) {
    const { row } = numbers;
    const terms = sum(numbers.totals.terms);
    const fact = (name, value, key) =>
      element("span", { class: "fact", "data-key": key ?? name }, `${name} `, element("b", { class: "number" }, value));
    const rewards = Object.entries(row.rewards ?? {}).map(([name, value]) =>
      fact(name.replaceAll("_", " "), short(value), name),
    );
    return element(
      "article",
      { class: "completion", "data-completion": row.completion_index, "data-rank": rank, "data-sum": terms },
      element(
        "h4",
        {},
        `Completion ${row.completion_index}`,
        element("span", { class: "return", "data-key": "return" }, " return ", element("b", {}, short(row.return))),
      ),
      element(
        "p",
        { class: "facts" },
        fact("advantage", signed(row.advantage, 4), "advantage"),
        rewards,
        fact("length", `${row.sampler.length}`, "length"),
        fact(
          "end",
          { stop: "stopped", length: "cut off" }[row.finish_reason] ?? row.finish_reason ?? "–",
          "finish_reason",
        ),
        this.hasTerms && fact("sum of terms", signed(terms, 8), "terms"),
      ),
      row.ids?.length
        ? this.segments(numbers)
        : element("p", { class: "text" }, "The tokens were not written. Text: ", shortened(row.text ?? "", 20000)),
      row.turns && conversation(row),
    );
  }

  /** The tokens of a row, cut where the mask changes: what the policy sampled, and what was put between. */
  segments(numbers) {
    const { row } = numbers;
    const label = `Tokens of completion ${row.completion_index}`;
    const list = this.list(label, row.ids, numbers, "completion");
    const starts = row.mask.flatMap((bit, i) => (i === 0 || bit !== row.mask[i - 1] ? [i] : []));
    if (starts.length < 2 || !row.turns) return list;
    const tokens = [...list.children];
    starts.forEach((start, segment) => {
      const length = (starts[segment + 1] ?? row.mask.length) - start;
      const [who, where] = row.mask[start] ? ["policy", "in the loss"] : ["tools and template", "not in the loss"];
      const text = `${who}: ${count(length, "token")} ${where}`;
      tokens[start].before(element("span", { class: "segment", role: "presentation", "aria-hidden": "true" }, text));
    });
    return list;
  }

  /** A list of tokens, one of which the tab key reaches; the arrow keys move between them. */
  list(label, ids, numbers, part) {
    const list = element("div", {
      class: "tokens",
      role: "listbox",
      "aria-label": label,
      "aria-orientation": "horizontal",
      "data-part": part,
    });
    const spans = ids.map((id, index) => tokenSpan(id, index, !numbers?.row.mask[index]));
    list.dataset.list = this.tokens.push({ list, ids, numbers, spans }) - 1;
    list.append(...spans);
    return list;
  }

  // ---- colours

  /** Colour all tokens by one of `colors`, in a pass over the rollout ("all" of them for terms and pushes). */
  paint({ by: wanted, pass }) {
    const by = Object.hasOwn(this.colors, wanted) ? wanted : "push";
    const kind = this.colors[by];
    this.root.querySelector("#color").value = by;
    this.pass = this.offerPasses(kind, pass);
    const views = this.rows.map((numbers) => ({
      ...numbers,
      update: this.pass === "all" ? null : numbers.row.updates[this.pass],
    }));
    const values = views.map((view) => view.row.sampler.map((_, i) => kind.value(view, i)));
    const most = kind.scale(values.flat());
    for (const { numbers, spans } of this.tokens.filter((list) => list.numbers)) {
      const r = this.rows.indexOf(numbers);
      spans.forEach((span, index) => {
        const i = numbers.action[index];
        if (i === null) return;
        const value = values[r][i];
        span.classList.toggle("below", kind.flipped ? value > 0 : value < 0);
        span.classList.toggle("unknown", !isNumber(value));
        span.classList.toggle("clipped", Boolean(views[r].update?.tokens.clipped?.[i]));
        span.style.setProperty("--strength", isNumber(value) ? Math.min(Math.abs(value) / most, 1).toFixed(3) : "0");
      });
    }
    this.showScale(kind, by, most, values.flat().some(isNumber));
    this.show(this.chosen ?? null);
  }

  showScale(kind, by, most, known) {
    this.root.dataset.scale = by === "mask" ? "mask" : kind.diverging ? "diverging" : "sequential";
    const ramp = element("span", { class: `ramp${kind.flipped ? " flipped" : ""}`, "aria-hidden": "true" });
    const [low, ...high] = kind.ends(most).map((text) => element("span", {}, text));
    fill(
      this.legend,
      element("span", { class: "unseen" }, "Scale: "),
      high.length > 1 ? [low, ramp, high[1]] : [low, ramp, high[0]],
    );
    if (known) return;
    fill(this.legend, "The run wrote no numbers of this kind for these completions.");
  }

  /** The updates that one can choose from, and the one that is chosen. */
  offerPasses(kind, wanted) {
    const all = this.rows.map(({ row }) => row.updates);
    const most = all.reduce((longest, updates) => (updates.length > longest.length ? updates : longest), []);
    const options = most.map(({ epoch }, i) => [String(i), `epoch ${epoch}`]); // one update per row and epoch
    if (kind.total) options.unshift(["all", "all together"]);
    const select = this.root.querySelector("#pass");
    fill(
      select,
      options.map(([value, text]) => element("option", { value }, text)),
    );
    const chosen = options.some(([value]) => value === wanted) ? wanted : (options[0]?.[0] ?? "0");
    if (options.length) select.value = chosen;
    this.root.querySelector("#pass-pair").hidden = most.length < 2 || !kind.passes;
    return kind.passes ? chosen : "0";
  }

  // ---- choosing a token

  placeOf(target) {
    const span = target.closest?.(".token[data-index]");
    return span && { list: Number(span.parentNode.dataset.list), index: Number(span.dataset.index) };
  }

  hover({ target }) {
    const place = this.placeOf(target);
    if (place) this.show(place);
  }

  focus({ target }) {
    const place = this.placeOf(target);
    if (place) this.choose(place);
  }

  choose(place, told = true) {
    const { list, spans, numbers } = this.tokens[place.list];
    this.unselect();
    list.querySelector('[tabindex="0"]').tabIndex = -1;
    spans[place.index].tabIndex = 0;
    spans[place.index].setAttribute("aria-selected", "true");
    this.chosen = place;
    this.show(place);
    if (!told) return;
    this.spoken.textContent = visible(this.sentence(place));
    this.onToken(numbers ? numbers.row.completion_index : null, numbers ? place.index : null);
  }

  key(event) {
    const place = this.placeOf(event.target);
    if (!place || event.ctrlKey || event.metaKey || event.altKey) return;
    const { spans } = this.tokens[place.list];
    const last = spans.length - 1;
    const moves = { ArrowLeft: place.index - 1, ArrowRight: place.index + 1, Home: 0, End: last };
    let next = null;
    if (event.key in moves) next = spans[Math.min(Math.max(moves[event.key], 0), last)];
    else if (event.key === "ArrowDown" || event.key === "ArrowUp")
      next = inNextLine(spans, place.index, event.key === "ArrowDown" ? 1 : -1);
    else if (event.key === "PageDown" || event.key === "PageUp") {
      const other = this.tokens[place.list + (event.key === "PageDown" ? 1 : -1)];
      next = other?.spans[Math.min(place.index, other.spans.length - 1)];
    } else if (event.key === "Escape") this.clear();
    else return;
    event.preventDefault();
    next?.focus();
  }

  /** Choose the token that an address names. */
  select(completion, index) {
    const list = this.tokens.findIndex(({ numbers }) => numbers?.row.completion_index === completion);
    if (list >= 0 && this.tokens[list].spans[index]) this.choose({ list, index }, false);
  }

  unselect() {
    if (this.chosen) this.tokens[this.chosen.list].spans[this.chosen.index].setAttribute("aria-selected", "false");
  }

  /** No token is chosen any more. */
  clear() {
    this.unselect();
    this.chosen = null;
    this.show(null);
    this.onToken(null, null);
  }

  // ---- the numbers of a token

  /** What is known of a token: its place, its text, and its numbers where it has some. */
  facts({ list, index }) {
    const { ids, numbers } = this.tokens[list];
    const [text, flags] = tokenOf(ids[index]);
    const prompt = this.group.prompt?.length ?? 0;
    const position = numbers ? prompt + index : index;
    const facts = { id: ids[index], text, flags, numbers, index, position, i: numbers?.action[index] ?? null };
    const all = numbers ? count(numbers.row.sampler.length, "token") : "";
    if (!numbers) facts.role = "part of the prompt, not in the loss";
    else if (facts.i !== null) facts.role = `in the loss: number ${facts.i + 1} of ${all} that the policy sampled`;
    else facts.role = "not sampled by the policy (a tool's answer or the template): not in the loss";
    return facts;
  }

  sentence(place) {
    const { text, numbers, i, position, role } = this.facts(place);
    const start = `${spoken(text)}, position ${position}, ${role}`;
    if (i === null) return start;
    const logProb = exact(difference(numbers.row.sampler[i], 0));
    const advantage = signed(numbers.row.advantage, 4);
    const [push, term] = [numbers.totals.push[i], numbers.totals.terms[i]].map(short);
    return `${start}; log-prob ${logProb}, advantage ${advantage}, push ${push}, term ${term}`;
  }

  show(place) {
    if (!place) {
      const how = "Point at a token, or go to one with the tab key and then the arrow keys, to read its numbers.";
      fill(this.readout, element("p", { class: "note" }, how));
      return;
    }
    const facts = this.facts(place);
    const { id, text, flags, numbers, position, role } = facts;
    const looks = `token mark${flags ? " special" : ""}${flags & END_OF_TURN ? " end" : ""}`;
    const which = [
      element("span", { class: looks, "data-key": "text" }, text ? markedText(text) : "empty"),
      element("span", {}, "id ", element("b", { "data-key": "id" }, String(id))),
      element("span", {}, "position ", element("b", { "data-key": "position" }, String(position))),
      numbers && element("span", {}, `completion ${numbers.row.completion_index}`),
      element("span", { "data-key": "role" }, role),
      element("button", { type: "button", class: "plain close", on: { click: () => this.clear() } }, "Close"),
    ];
    fill(this.readout, element("div", { class: "which" }, which), facts.i !== null && numberTable(facts));
  }
}

/** The token under (or above) another one, in the line as it is set. */
function inNextLine(spans, index, direction) {
  const from = spans[index].getBoundingClientRect();
  const middle = from.left + from.width / 2;
  let line = null;
  let best = null;
  for (let i = index + direction; spans[i]; i += direction) {
    const box = spans[i].getBoundingClientRect();
    if (Math.abs(box.top - from.top) < from.height / 2) continue;
    line ??= box.top;
    if (Math.abs(box.top - line) > from.height / 2) break;
    const distance = Math.abs(box.left + box.width / 2 - middle);
    if (!best || distance < best.distance) best = { distance, span: spans[i] };
  }
  return best?.span ?? null;
}
