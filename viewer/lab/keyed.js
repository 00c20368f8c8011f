// Randomness by key instead of by stream, bit for bit that of common/keyed.py: NumPy's SeedSequence, Philox4x64-10 and
// Generator.

const MASK_64 = (1n << 64n) - 1n;

/** A generator that depends only on `name` (the purpose of the numbers) and `key`, integers from 0 to 2^32 - 1. */
export function keyed_generator(name, ...key) {
  return new Generator(seed_words([crc32(name), key.length, ...key]));
}

class Generator {
  #counter = 0n;
  #buffer = []; // 64-bit numbers that are not used yet
  #half = null; // the upper half of one of which the lower half is used
  #key;

  constructor([a, b, c, d]) {
    this.#key = [a | (b << 32n), c | (d << 32n)];
  }

  /** The next number in [0, 1): 53 bits. */
  random() {
    return Number(this.#next_64() >> 11n) / 2 ** 53;
  }

  /** The numbers 0 to n-1, shuffled: Fisher and Yates, with numbers up to i by masks and rejection. */
  permutation(n) {
    const order = Array.from({ length: n }, (_, i) => i);
    for (let i = n - 1; i > 0; i--) {
      const mask = 2 ** (32 - Math.clz32(i)) - 1;
      let j = i + 1;
      while (j > i) j = (this.#next_32() & mask) >>> 0;
      [order[i], order[j]] = [order[j], order[i]];
    }
    return order;
  }

  #next_32() {
    const next = this.#half ?? this.#next_64(); // the lower half first
    this.#half = this.#half === null ? next >> 32n : null;
    return Number(next & 0xffffffffn);
  }

  #next_64() {
    if (!this.#buffer.length) this.#buffer = philox(++this.#counter, this.#key);
    return this.#buffer.shift();
  }
}

/** Philox4x64-10 (Salmon et al. 2011): four 64-bit numbers of a counter and a key. */
function philox(counter, [k0, k1]) {
  let c = [counter, 0n, 0n, 0n];
  for (let round = 0; round < 10; round++) {
    const a = 0xd2e7470ee14c6c93n * c[0];
    const b = 0xca5a826395121157n * c[2];
    c = [(b >> 64n) ^ c[1] ^ k0, b & MASK_64, (a >> 64n) ^ c[3] ^ k1, a & MASK_64];
    [k0, k1] = [(k0 + 0x9e3779b97f4a7c15n) & MASK_64, (k1 + 0xbb67ae8584caa73bn) & MASK_64];
  }
  return c;
}

/** NumPy's SeedSequence(entropy).generate_state(4): a hash of 32-bit words. */
function seed_words(entropy) {
  const mix = (x, y) => {
    const r = (Math.imul(x, 0xca01f9dd) - Math.imul(y, 0x4973f715)) >>> 0;
    return (r ^ (r >>> 16)) >>> 0;
  };
  const hasher = (hash, factor) => (value) => {
    value = (value ^ hash) >>> 0;
    hash = Math.imul(hash, factor) >>> 0;
    value = Math.imul(value, hash) >>> 0;
    return (value ^ (value >>> 16)) >>> 0;
  };
  const put = hasher(0x43b0d7e5, 0x931e8875);
  const get = hasher(0x8b51f9dd, 0x58f38ded);
  const pool = [0, 1, 2, 3].map((i) => put(entropy[i] ?? 0));
  for (let s = 0; s < 4; s++) for (let d = 0; d < 4; d++) if (s !== d) pool[d] = mix(pool[d], put(pool[s]));
  for (const word of entropy.slice(4)) for (let d = 0; d < 4; d++) pool[d] = mix(pool[d], put(word));
  return pool.map((word) => BigInt(get(word)));
}

/** zlib's checksum of a text. */
function crc32(text) {
  let c = -1;
  for (const byte of new TextEncoder().encode(text)) {
    c ^= byte;
    for (let bit = 0; bit < 8; bit++) c = (c >>> 1) ^ (0xedb88320 & -(c & 1));
  }
  return ~c >>> 0;
}

/** The rows that step 1, 2, ... trains on, as in harness/data/order.py: a new permutation every epoch. */
export function prompts_of_step(num_rows, prompts_per_step, step, seed) {
  const steps_per_epoch = Math.floor(num_rows / prompts_per_step);
  const epoch = Math.floor((step - 1) / steps_per_epoch);
  const position = (step - 1) % steps_per_epoch;
  const order = keyed_generator("data order", seed, epoch).permutation(num_rows);
  return order.slice(position * prompts_per_step, (position + 1) * prompts_per_step);
}
