// What a completion earns: `correct` of tasks/arithmetic.py, two others to try, and the reader's own.

const SPACES = /[\p{White_Space}\x1c-\x1f]/u; // as Python's str.split and \s

/** 1 if the text holds one closed <answer>, outside <think>, and it equals the answer, else 0. */
export function correct(text, answer) {
  const given = given_answer(text);
  return +(given !== null && normalize_answer(given) === normalize_answer(String(answer)));
}

/** The text in a completion's only <answer>; null if there is no answer, several, or one inside a thought. */
function given_answer(text) {
  const [head, ...thoughts] = text.split("<think>");
  const parts = [head, ...thoughts.map((thought) => partition(thought, "</think>")[2])]; // an unclosed one never ends
  const answer = only_answer(parts.join("<think>"));
  const has_thought = answer !== null && answer.includes("<think>");
  return !has_thought && only_answer(text) !== null ? answer : null;
}

/** One spelling: no spaces, no thousands commas, no leading plus or zeros, no trailing `.0`. */
function normalize_answer(text) {
  text = text.split(SPACES).join("");
  const match = /^([+-]?)(\p{Nd}+|\p{Nd}{1,3}(?:,\p{Nd}{3})+)(?:\.0*)?$/u.exec(text);
  if (!match) return text;
  const number = match[2].replaceAll(",", "").replace(/^0+/, "") || "0";
  return match[1] === "-" && number !== "0" ? `-${number}` : number;
}

/** The text in the only <answer>; null if there is none, or more than one. */
function only_answer(text) {
  const [answer, end, rest] = partition(partition(text, "<answer>")[2], "</answer>");
  return end && !partition(rest, "<answer>")[2].includes("</answer>") ? answer : null;
}

function partition(text, mark) {
  const start = text.indexOf(mark);
  return start < 0 ? [text, "", ""] : [text.slice(0, start), mark, text.slice(start + mark.length)];
}

/** Whether an answer is reasoned: after a <think> that is closed and not empty. */
export function is_reasoned(text) {
  const [before] = partition(text, "<answer>");
  const thought = new RegExp(`<think>${SPACES.source}*[^<\\p{White_Space}\\x1c-\\x1f]`, "u").exec(before);
  return thought !== null && before.includes("</think>", thought.index + thought[0].length);
}

// What a completion's return is: (text, answer, question) -> number
export const REWARDS = {
  correct,
  short: (text, answer) => correct(text, answer) - text.length / 200, // right, in few characters
  long: (text) => text.length / 100, // a reward that can be gamed
};

/** The reader's reward: a function that returns a finite number, or throws one sentence. */
export function own_reward(source) {
  let reward;
  try {
    reward = new Function("text", "answer", "question", "correct", `"use strict";\n${source}`);
  } catch (error) {
    throw new Error(`The reward is no JavaScript: ${error.message}.`);
  }
  return (text, answer, question) => {
    let value;
    try {
      value = reward(text, answer, question, correct);
    } catch (error) {
      throw new Error(`The reward failed at the completion ${JSON.stringify(text)}: ${error?.message ?? error}.`);
    }
    if (typeof value === "boolean") value = Number(value);
    if (typeof value === "number" && Number.isFinite(Math.fround(value))) return value; // float32, as in Python
    const given = typeof value === "number" ? `${value}` : `${JSON.stringify(value)}, which is no number`;
    throw new Error(`The reward returned ${given}, at the completion ${JSON.stringify(text)}: give a finite number.`);
  };
}
