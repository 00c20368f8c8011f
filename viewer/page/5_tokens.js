// What a token looks like, and what it can be coloured by.

const SPECIAL = 1; // flags of a token
const END_OF_TURN = 2;
const LONGEST_TOKEN = 200; // characters of a token that are shown

/** A token's [text, flags]; of a token whose text the run did not write there is only the id. */
const tokenOf = (id) => data.tokens[id] ?? [`‹${id}›`, 0];

/** A token's text for labels, where blanks are words. */
const spoken = (text) => shortened(text, 40).replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥");

/** Text with marks on its blanks; the marks are drawn by the style sheet, so that the text stays what it is. */
function markedText(text) {
  return shortened(text, LONGEST_TOKEN)
    .split(/([ \n\t])/)
    .map((part) => {
      const name = { " ": "space", "\n": "newline", "\t": "tab" }[part];
      return name ? element("span", { class: name }, part) : part;
    });
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
  return element(
    "span",
    {
      class: ["token", ...Object.keys(looks).filter((look) => looks[look])].join(" "),
      role: "option",
      "aria-selected": "false",
      "aria-label": text.trim() ? null : spoken(text) || "empty",
      tabindex: index ? -1 : 0,
      "data-index": index,
    },
    markedText(text),
  );
}

// ---- colours

// What a token can be coloured by. `value` gives the number of action token i of a row (update: that of the chosen pass,
// or null), `scale` what the strongest colour means, given all numbers of the group; diverging ones have two colours.
const COLORS = {
  mask: { label: "in the loss or not", value: () => 1, scale: () => 1, ends: () => ["", "in the loss"] },
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
  ratio: {
    label: "probability ratio",
    diverging: true,
    passes: true,
    value: ({ update }, i) => (update ? Math.log(update.ratio[i]) : NaN),
    scale: (values) => largest(values.map(Math.abs), Math.log(1 + data.loss.clip_eps)),
    ends: (most) => [Math.exp(-most).toFixed(2), "1", Math.exp(most).toFixed(2)],
  },
  kl: {
    label: "KL to the reference",
    passes: true,
    value: ({ update }, i) => (update ? update.kl[i] : NaN),
    scale: (values) => largest(values, 1e-4),
    ends: (most) => ["0", `${short(most)} nats`],
  },
  entropy: {
    label: "entropy",
    value: ({ row }, i) => (row.entropy ? difference(row.entropy[i], 0) : NaN),
    scale: (values) => largest(values, 0.1),
    ends: (most) => ["0 (decided)", `${short(most)} nats (open)`],
  },
  term: {
    label: "term in the loss",
    diverging: true,
    passes: true,
    total: true,
    flipped: true, // a term that lowers the loss has the colour of a positive advantage
    value: ({ update, total }, i) => (update ? update.term[i] : total[i]),
    scale: (values) => largest(values.map(Math.abs), 1e-9),
    ends: (most) => [`${short(-most)} (lowers)`, "0", `${short(most)} (raises the loss)`],
  },
};

/** The numbers of a row that do not depend on what is chosen. */
function numbersOf(row) {
  const updates = tokenTerms(row, data.loss);
  let action = 0; // the numbers are lists over action tokens only
  return {
    row,
    updates,
    total: totalTerms(row, data.loss, updates),
    action: row.mask.map((bit) => (bit ? action++ : null)),
  };
}
