// The settings that a reader can change, as controls and as the part of a link behind #. texts.toml has their words.

const CONTROLS = data.texts.controls; // by name, as in the train.py files: {group, label, about, range, options, ...}
const UNUSED = ["kl_weight", "epochs_per_step", "minibatch_size", "clip_eps"]; // by REINFORCE
const OWN_DEFAULTS = { lag: 0, correction: "none", reward: "correct", reward_source: null, mistake: null, seed: 0 };
const DEFAULTS = { algorithm: "grpo", clip_eps: null, ...OWN_DEFAULTS, ...data.defaults };
const EXAMPLE_REWARD = `// Pays for a right answer, and a little for every 7.
return correct(text, answer) + (text.split("7").length - 1) / 10;`;

const inputOf = (name) => byId(`setting-${name}`);

/** The value of a setting from the text of its control or of a link; throws a sentence that says what is allowed. */
function parseSetting(name, text) {
  const { label, options, range: [least, most] = [], whole, empty, long } = CONTROLS[name];
  if ((empty || long) && text.trim() === "") return null;
  if (long && text.length <= 2000) return text;
  if (long) throw new Error(`${label}: at most 2,000 characters.`);
  if (options && Object.hasOwn(options, text)) return text;
  if (options) throw new Error(`${label}: choose one of ${Object.keys(options).filter(Boolean).join(", ")}.`);
  const value = Number(text);
  if (text.trim() && value >= least && value <= most && (!whole || Number.isInteger(value))) return value;
  throw new Error(`${label}: give a ${whole ? "whole number" : "number"} from ${least} to ${most}.`);
}

/** What is wrong between settings that are each allowed; an empty text if nothing is. */
function contradiction({ group_size, prompts_per_step, minibatch_size, algorithm, reward, reward_source }) {
  const rows = group_size * prompts_per_step;
  if (group_size < 2 && !algorithm.startsWith("reinforce"))
    return "With one answer to each question there is nothing to compare: ask for two or more, or choose REINFORCE.";
  if (rows > 512) return `${rows} answers per step are too many for a browser tab: ask for at most 512.`;
  if (minibatch_size !== null && (minibatch_size % group_size || minibatch_size > rows))
    return `Answers per update: give a multiple of ${group_size}, the answers to each question, up to ${rows}.`;
  return reward === "own" && !reward_source ? "Write your reward into its box, or choose another one." : "";
}

/** The settings that are not the default ones, in words. */
function nameOf(settings) {
  const isNamed = (name) => settings[name] !== DEFAULTS[name] && name !== "steps" && name !== "reward_source";
  const words = Object.keys(CONTROLS).filter(isNamed).map((name) => {
    const { label, empty, options } = CONTROLS[name];
    const text = options?.[settings[name]]?.[0] ?? String(settings[name] ?? empty);
    return name === "algorithm" ? text : `${label.toLowerCase()} ${text}`;
  });
  return words.join(", ") || "default settings";
}

const isSame = (one, other) => Object.keys(CONTROLS).every((name) => one[name] === other[name] || name === "steps");

// ---- the form

function drawForm() {
  const control = (name) => {
    const { label, range, options, whole, empty, long } = CONTROLS[name];
    const id = `setting-${name}`;
    const described = { id, name, "aria-describedby": `${id}-about` };
    const choices = Object.entries(options ?? {}).map(([value, [text]]) => element("option", { value }, text));
    const hints = { inputmode: whole ? "numeric" : "decimal", placeholder: empty, title: range && range.join(" to ") };
    const box = () => element("textarea", { ...described, rows: 4, maxlength: 2000, spellcheck: "false" });
    const field = () => element("input", { type: "text", ...described, ...hints });
    const button = element("button", { type: "button", id: "check" }, "Try it on an answer");
    const check = long && [button, element("span", { id: "checked", role: "status" })];
    const input = options ? element("select", described, choices) : long ? box() : field();
    const about = element("p", { class: "note", id: `${id}-about` });
    const looks = { class: `setting${long ? " long" : ""}` };
    return element("div", looks, element("label", { for: id }, label), input, check, about);
  };
  const group = ([title, about]) => {
    const names = Object.keys(CONTROLS).filter((name) => CONTROLS[name].group === title);
    const lines = title === "Algorithm" && element("div", { id: "lines" });
    const parts = [element("summary", {}, title), element("p", { class: "note" }, about), names.map(control), lines];
    return element("details", { open: title === "Algorithm" }, parts);
  };
  fill(byId("form"), Object.entries(data.texts.groups).map(group));
}

/** The settings of the form; throws a sentence if one is not allowed. */
function readForm() {
  const read = Object.keys(CONTROLS).map((name) => [name, parseSetting(name, inputOf(name).value)]);
  const settings = Object.fromEntries(read);
  return settings.reward === "own" ? settings : { ...settings, reward_source: null };
}

/** The settings of the form, or null. */
function formed() {
  try {
    return readForm();
  } catch {
    return null;
  }
}

/** Show settings in the form; groups with one that is not the default are opened. */
function fillForm(settings) {
  for (const name of Object.keys(CONTROLS)) {
    inputOf(name).value = settings[name] ?? (name === "reward_source" ? EXAMPLE_REWARD : "");
    if (settings[name] !== DEFAULTS[name]) inputOf(name).closest("details").open = true;
  }
  formChanged();
}

/** Sentences, faults and lines that follow from what the form says; the address keeps what can be used. */
function formChanged() {
  for (const [name, { options, about }] of Object.entries(CONTROLS)) {
    const input = inputOf(name);
    let fault = "";
    try {
      parseSetting(name, input.value);
    } catch (error) {
      fault = error.message;
    }
    input.setAttribute("aria-invalid", String(Boolean(fault)));
    byId(`setting-${name}-about`).textContent = fault || (options ? options[input.value][1] : about);
  }
  const isPlain = inputOf("algorithm").value.startsWith("reinforce");
  for (const name of UNUSED) inputOf(name).disabled = isPlain;
  inputOf("reward_source").closest(".setting").hidden = inputOf("reward").value !== "own";
  const { file, lines } = data.lines[inputOf("algorithm").value];
  const marked = lines.map(([text, isNew]) => [element(isNew ? "mark" : "span", {}, text), "\n"]);
  const looks = { tabindex: 0, role: "region", "aria-label": `lines of ${file}` };
  const code = element("pre", looks, element("code", {}, marked));
  fill(byId("lines"), element("a", { href: pageOf(file) }, file), code);
  if (!document.querySelector('[aria-invalid="true"]')) {
    const settings = readForm();
    const named = Object.keys(CONTROLS).filter((name) => settings[name] !== DEFAULTS[name]);
    const address = new URLSearchParams(named.map((name) => [name, settings[name] ?? ""]));
    history.replaceState(null, "", `#${address}`);
  }
  refresh();
}

/** The settings that the address names; what is wrong in it is said, and left out. */
function readAddress() {
  const [settings, faults] = [{ ...DEFAULTS }, []];
  for (const [name, text] of new URLSearchParams(location.hash.slice(1))) {
    try {
      if (!Object.hasOwn(CONTROLS, name)) throw new Error(`There is no setting ${shortened(name, 40)}.`);
      settings[name] = parseSetting(name, text);
    } catch (error) {
      faults.push(error.message);
    }
  }
  const own = "This link brings a reward of its own: read it under Settings before you train.";
  if (faults.length) say(`Parts of the link cannot be used; the defaults take their place. ${faults.join(" ")}`);
  else if (settings.reward === "own") say(own);
  return settings;
}

/** The address of a file of the repository: in the book pages are HTML. */
function pageOf(path) {
  const page = path.replace(/README\.md/, "index.html").replace(/\.md/, ".html").replace(/\.py$/, ".py.html");
  return data.base + (data.isBook ? page : path);
}
