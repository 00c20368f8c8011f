// The byte-level BPE of the bundled policy's tokenizer.json, its chat template, and the way back to text.

export const PAD_ID = 0;
export const END_OF_TURN_ID = 2;
const CONTROL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]; // ids 0 to 2
const WORDS = /'[a-z]+| ?\p{L}+|\p{N}| ?[^\p{White_Space}\p{L}\p{N}]+|\p{White_Space}+/gu;

export class Tokenizer {
  /** From the contents of tokenizer.json. */
  constructor({ model, added_tokens }) {
    this.vocab = model.vocab;
    this.rank = new Map(model.merges.map((pair, i) => [pair.join(" "), i]));
    this.added = new Map(added_tokens.map((token) => [token.content, token.id]));
    this.added_tokens = any_of([...this.added.keys()].sort((a, b) => b.length - a.length));
    this.pieces = [];
    for (const [piece, id] of [...Object.entries(this.vocab), ...this.added]) this.pieces[id] = piece;
    // every byte is written as a letter that can be printed
    this.letters = [];
    for (let byte = 0, others = 256; byte < 256; byte++) {
      const prints = (byte >= 33 && byte <= 126) || (byte >= 161 && byte <= 172) || byte >= 174;
      this.letters.push(String.fromCodePoint(prints ? byte : others++));
    }
    this.bytes = new Map(this.letters.map((letter, byte) => [letter, byte]));
  }

  /** The ids of a question in the chat template, up to the point where the answer begins. */
  encode_prompt(question) {
    const [, im_start, im_end] = CONTROL_TOKENS.map((text) => this.added.get(text));
    // the text of a question never becomes a control token
    const [first, ...others] = question.split(any_of(CONTROL_TOKENS));
    const content = others.flatMap((part, i) => (i % 2 ? this.encode(part) : this.#encode_text(part)));
    const user = [...this.encode(`user\n${first}`), ...content];
    return [im_start, ...user, im_end, ...this.encode("\n"), im_start, ...this.encode("assistant\n")];
  }

  /** Text to ids; added tokens, such as <think>, are cut out first. */
  encode(text) {
    const parts = text.split(this.added_tokens);
    return parts.flatMap((part) => (this.added.has(part) ? [this.added.get(part)] : this.#encode_text(part)));
  }

  #encode_text(text) {
    return (text.match(WORDS) ?? []).flatMap((word) => this.#encode_word(word));
  }

  /** Byte-pair encoding: the pair that was learned first is merged first, everywhere in the word. */
  #encode_word(word) {
    const parts = [...new TextEncoder().encode(word)].map((byte) => this.letters[byte]);
    for (;;) {
      let best = -1;
      let lowest = Infinity;
      for (let i = 0; i + 1 < parts.length; i++) {
        const rank = this.rank.get(`${parts[i]} ${parts[i + 1]}`);
        if (rank < lowest) [lowest, best] = [rank, i];
      }
      if (best < 0) return parts.map((part) => this.vocab[part]);
      const [a, b] = [parts[best], parts[best + 1]];
      for (let i = 0; i + 1 < parts.length; i++) if (parts[i] === a && parts[i + 1] === b) parts.splice(i, 2, a + b);
    }
  }

  /** The text of a completion, without control tokens. */
  decode(ids) {
    const letters = ids.filter((id) => id >= CONTROL_TOKENS.length).flatMap((id) => [...this.pieces[id]]);
    const bytes = Uint8Array.from(letters, (letter) => this.bytes.get(letter));
    return new TextDecoder("utf-8", { ignoreBOM: true }).decode(bytes);
  }
}

/** A regular expression that splits a text at any of the given texts, and keeps them. */
function any_of(texts) {
  return new RegExp(`(${texts.map((text) => text.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")).join("|")})`);
}
