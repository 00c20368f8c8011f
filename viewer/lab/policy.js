// The policy: a Llama model in WebAssembly memory, with the gradient of any loss of its log-probs, and AdamW.
//
// A row is {prompt, ids, action_mask}: the ids of a prompt, and those that follow it, of which action_mask marks the
// tokens that count. Rows of one prompt are adjacent, so that the prompt is computed once.
//
// Shapes: n tokens, h numbers of a hidden state, V ids. A token is [id, position, first, shared, own], see kernels.c.

const MEMORY_PAGES = 3072; // of 64 KiB: 192 MiB, of which a page that is never touched costs nothing
const MICRO_BATCH_TOKENS = 1024; // at the same time in memory, with everything that the gradient needs of them

/** Memory that the kernels compute in; what a scope allocates is free again after it. */
export class Memory {
  constructor(module) {
    const memory = new WebAssembly.Memory({ initial: MEMORY_PAGES, maximum: MEMORY_PAGES });
    const { __heap_base, ...kernels } = new WebAssembly.Instance(module, { env: { memory } }).exports;
    this.buffer = memory.buffer;
    this.next = __heap_base.value;
    // a kernel gets the addresses of arrays
    const with_addresses = (kernel) => (...values) => kernel(...values.map((value) => value.byteOffset ?? value));
    this.kernels = Object.fromEntries(Object.entries(kernels).map(([name, kernel]) => [name, with_addresses(kernel)]));
  }

  floats(n) {
    return new Float32Array(this.buffer, this.#take(4 * n), n);
  }

  ints(values) {
    const array = new Int32Array(this.buffer, this.#take(4 * values.length), values.length);
    array.set(values);
    return array;
  }

  #take(bytes) {
    const start = this.next;
    if (start + bytes > this.buffer.byteLength) throw new Error("there is not enough memory for these settings");
    this.next = (start + bytes + 15) & ~15;
    return start;
  }

  scope(work) {
    const before = this.next;
    try {
      return work();
    } finally {
      this.next = before;
    }
  }
}

export class Policy {
  /** `config`: of config.json; `tensors`: of a safetensors file, by name. */
  constructor(memory, config, tensors) {
    Object.assign(this, { memory, config, sizes: Object.entries(tensors).map(([name, { length }]) => [name, length]) });
    this.size = this.sizes.reduce((sum, [, length]) => sum + length, 0);
    this.weights = memory.floats(this.size);
    this.w = this.#by_name(this.weights);
    for (const name in tensors) this.w[name].set(tensors[name]);
    [this.cos, this.sin] = rotations(memory, config);
  }

  /** A policy of its own with the same weights, without an optimizer: the reference, for example. */
  copy() {
    return new Policy(this.memory, this.config, this.w);
  }

  /** Gradients, and the moving averages of AdamW: only the policy that is trained has them. */
  prepare_training() {
    [this.grad, this.m, this.v] = [0, 0, 0].map(() => this.memory.floats(this.size));
    this.g = this.#by_name(this.grad);
    this.updates = 0;
  }

  #by_name(array) {
    let start = 0;
    return Object.fromEntries(this.sizes.map(([name, n]) => [name, array.subarray(start, (start += n))]));
  }

  // ---- layers

  /** y (n, outputs) = x (n, inputs) W^T, or added to y. */
  #linear(n, x, name, y, outputs, adds = 0) {
    const w = this.w[name];
    const inputs = w.length / outputs;
    this.memory.kernels.gemm(n, outputs, inputs, x, inputs, 1, w, 1, inputs, y, adds);
  }

  /** Adds to the gradient of W, and sets dx or adds to it. */
  #linear_grad(n, x, name, dy, outputs, dx, adds = 0) {
    const [w, g] = [this.w[name], this.g[name]];
    const inputs = w.length / outputs;
    this.memory.kernels.gemm(outputs, inputs, n, dy, 1, outputs, x, inputs, 1, g, 1);
    this.memory.kernels.gemm(n, inputs, outputs, dy, outputs, 1, w, inputs, 1, dx, adds);
  }

  /**
   * The hidden states after the last norm, and everything that `#backward` needs.
   *
   * Keys and values are found by slot: those of the i-th token are in slot i, or in the caches.
   */
  forward(tokens, caches = null) {
    const { memory, w, config } = this;
    const { H, I, A, K, D } = letters(config);
    const { rms_norm, rope, attention, swiglu } = memory.kernels;
    const n = tokens.length;
    const t = memory.ints(tokens.flat());
    const width = Math.max(...tokens.map(([, position]) => position)) + 1;
    const floats = (size) => memory.floats(n * size);
    let h = floats(H);
    tokens.forEach(([id], i) => h.set(w["model.embed_tokens.weight"].subarray(id * H, (id + 1) * H), i * H));
    const layers = [];
    for (let l = 0; l < config.num_hidden_layers; l++) {
      const a = { h, inv1: floats(1), norm1: floats(H), q: floats(A * D), k: floats(K * D), v: floats(K * D) };
      rms_norm(n, H, config.rms_norm_eps, h, w[norm_of(l, "input")], a.norm1, a.inv1);
      this.#linear(n, a.norm1, attn(l, "q"), a.q, A * D);
      this.#linear(n, a.norm1, attn(l, "k"), a.k, K * D);
      this.#linear(n, a.norm1, attn(l, "v"), a.v, K * D);
      rope(n, A, D, a.q, t, this.cos, this.sin, 1);
      rope(n, K, D, a.k, t, this.cos, this.sin, 1);
      const { k, v } = caches ? caches[l].put(a, tokens) : a;
      Object.assign(a, { p: floats(A * width), attended: floats(A * D), mid: floats(H) });
      attention(n, A, K, D, a.q, k, v, t, a.p, width, a.attended);
      a.mid.set(h);
      this.#linear(n, a.attended, attn(l, "o"), a.mid, H, 1);
      Object.assign(a, { inv2: floats(1), norm2: floats(H), gate: floats(I), up: floats(I), act: floats(I) });
      rms_norm(n, H, config.rms_norm_eps, a.mid, w[norm_of(l, "post_attention")], a.norm2, a.inv2);
      this.#linear(n, a.norm2, mlp(l, "gate"), a.gate, I);
      this.#linear(n, a.norm2, mlp(l, "up"), a.up, I);
      swiglu(n * I, a.gate, a.up, a.act);
      h = floats(H);
      h.set(a.mid);
      this.#linear(n, a.act, mlp(l, "down"), h, H, 1);
      layers.push(a);
    }
    const [inv, output] = [floats(1), floats(H)];
    rms_norm(n, H, config.rms_norm_eps, h, w["model.norm.weight"], output, inv);
    return { tokens, t, width, layers, h, inv, output };
  }

  /** Adds to `grad`, given what `forward` returned and the gradient dy (n, h) by its output. */
  #backward({ tokens, t, width, layers, h, inv }, dy) {
    const { memory, w, g, config } = this;
    const { H, I, A, K, D } = letters(config);
    const { rms_norm_grad, rope, attention_grad, swiglu_grad } = memory.kernels;
    const n = tokens.length;
    const floats = (size) => memory.floats(n * size).fill(0);
    const [dh, d, d_act] = [floats(H), floats(H), floats(I)];
    const [d_attended, dq, dk, dv] = [floats(A * D), floats(A * D), floats(K * D), floats(K * D)];
    const norm_grad = (x, name, inverse, dy) => rms_norm_grad(n, H, x, w[name], inverse, dy, dh, g[name]);
    norm_grad(h, "model.norm.weight", inv, dy);
    for (let l = config.num_hidden_layers - 1; l >= 0; l--) {
      const a = layers[l];
      this.#linear_grad(n, a.act, mlp(l, "down"), dh, H, d_act);
      swiglu_grad(n * I, a.gate, a.up, d_act); // gate and up are now their gradients
      this.#linear_grad(n, a.norm2, mlp(l, "gate"), a.gate, I, d);
      this.#linear_grad(n, a.norm2, mlp(l, "up"), a.up, I, d, 1);
      norm_grad(a.mid, norm_of(l, "post_attention"), a.inv2, d);
      this.#linear_grad(n, a.attended, attn(l, "o"), dh, H, d_attended);
      dk.fill(0);
      dv.fill(0);
      attention_grad(n, A, K, D, a.q, a.k, a.v, t, a.p, width, d_attended, dq, dk, dv);
      rope(n, A, D, dq, t, this.cos, this.sin, -1);
      rope(n, K, D, dk, t, this.cos, this.sin, -1);
      this.#linear_grad(n, a.norm1, attn(l, "q"), dq, A * D, d);
      this.#linear_grad(n, a.norm1, attn(l, "k"), dk, K * D, d, 1);
      this.#linear_grad(n, a.norm1, attn(l, "v"), dv, K * D, d, 1);
      norm_grad(a.h, norm_of(l, "input"), a.inv1, d);
    }
    tokens.forEach(([id], i) => {
      for (let j = 0; j < H; j++) g["model.embed_tokens.weight"][id * H + j] += dh[i * H + j];
    });
  }

  /** The hidden states (N, h) of some tokens, the probabilities (N, V) of what follows, and their entropies. */
  #head({ output }, indices, temperature) {
    const { hidden_size: H, vocab_size: V } = this.config;
    const N = indices.length;
    const [hidden, probs, sum, mean] = [N * H, N * V, N, N].map((size) => this.memory.floats(size));
    indices.forEach((i, j) => hidden.set(output.subarray(i * H, (i + 1) * H), j * H));
    this.#linear(N, hidden, "model.embed_tokens.weight", probs, V);
    this.memory.kernels.softmax(N, V, temperature, probs, sum, mean);
    return { hidden, probs, entropy: (j) => Math.log(sum[j]) - mean[j] };
  }

  /** The probabilities of the next token: an array (V) for each of the given tokens. */
  next_probs(tokens, caches, indices, temperature) {
    const V = this.config.vocab_size;
    const { probs } = this.#head(this.forward(tokens, caches), indices, temperature);
    return indices.map((_, j) => probs.subarray(j * V, (j + 1) * V));
  }

  /**
   * The log-probs and entropies, in nats, of the tokens that count: for each row an array as long as its ids.
   *
   * With `loss`, a function of (the rows of a micro-batch, their log-probs, their entropies) that returns the slopes of
   * the loss by every log-prob, the gradient is added to `grad`.
   */
  score(rows, temperature, loss = null) {
    const longest = Math.max(...rows.map(({ prompt, ids }) => prompt.length + ids.length));
    const micro_batches = in_groups(rows, Math.max(1, Math.floor(MICRO_BATCH_TOKENS / longest)));
    const parts = micro_batches.map((micro) => this.memory.scope(() => this.#score(micro, temperature, loss)));
    return { log_probs: parts.flatMap((part) => part.log_probs), entropy: parts.flatMap((part) => part.entropy) };
  }

  #score(rows, temperature, loss) {
    const { hidden_size: H, vocab_size: V } = this.config;
    const { tokens, predictors, targets, places } = pack(rows);
    const N = targets.length;
    const pass = this.forward(tokens);
    const { hidden, probs, entropy: entropy_of } = this.#head(pass, predictors, temperature);
    const [log_probs, entropy] = [0, 0].map(() => rows.map((row) => new Float64Array(row.ids.length)));
    places.forEach(([b, t], j) => {
      log_probs[b][t] = Math.log(probs[j * V + targets[j]]);
      entropy[b][t] = entropy_of(j);
    });
    if (loss) {
      const slopes = loss(rows, log_probs, entropy);
      const slope = this.memory.floats(N);
      places.forEach(([b, t], j) => (slope[j] = slopes[b][t]));
      this.memory.kernels.log_prob_grad(N, V, temperature, probs, this.memory.ints(targets), slope);
      const d_hidden = this.memory.floats(N * H);
      this.#linear_grad(N, hidden, "model.embed_tokens.weight", probs, V, d_hidden);
      const dy = this.memory.floats(tokens.length * H).fill(0);
      predictors.forEach((i, j) => {
        for (let d = 0; d < H; d++) dy[i * H + d] += d_hidden[j * H + d];
      });
      this.#backward(pass, dy);
    }
    return { log_probs, entropy };
  }

  // ---- optimizer

  grad_norm() {
    return Math.sqrt(this.memory.kernels.square_sum(this.size, this.grad));
  }

  /** A step of AdamW, without weight decay, down the gradient times `scale`. */
  optimizer_step(lr, scale, beta1 = 0.9, beta2 = 0.999) {
    this.updates += 1;
    const [rate, root] = [lr / (1 - beta1 ** this.updates), Math.sqrt(1 - beta2 ** this.updates)];
    const { weights, grad, m, v } = this;
    this.memory.kernels.adamw(this.size, weights, grad, m, v, rate, beta1, beta2, root, scale);
  }

  is_finite() {
    return Number.isFinite(this.memory.kernels.square_sum(this.size, this.weights));
  }

  /** A hash of all bits of the weights. */
  checksum() {
    let sum = 0;
    for (const word of new Uint32Array(this.memory.buffer, this.weights.byteOffset, this.size))
      sum = (Math.imul(sum, 31) + word) >>> 0;
    return sum.toString(16).padStart(8, "0");
  }
}

/** The sizes of a config: hidden state, MLP, query heads, key heads, and numbers of a head. */
const letters = (c) =>
  ({ H: c.hidden_size, I: c.intermediate_size, A: c.num_attention_heads, K: c.num_key_value_heads, D: c.head_dim });
const attn = (layer, name) => `model.layers.${layer}.self_attn.${name}_proj.weight`;
const mlp = (layer, name) => `model.layers.${layer}.mlp.${name}_proj.weight`;
const norm_of = (layer, name) => `model.layers.${layer}.${name}_layernorm.weight`;

/** Cosines and sines of the angles of rotary position embeddings: (positions, head_dim / 2). */
function rotations(memory, { max_position_embeddings: positions, head_dim, rope_parameters: { rope_theta } }) {
  const half = head_dim / 2;
  const [cos, sin] = [memory.floats(positions * half), memory.floats(positions * half)];
  for (let i = 0; i < positions * half; i++) {
    const frequency = Math.fround(1 / Math.fround(rope_theta ** Math.fround((i % half) / half)));
    const angle = Math.fround(Math.floor(i / half) * frequency);
    [cos[i], sin[i]] = [Math.cos(angle), Math.sin(angle)];
  }
  return [cos, sin];
}

/** All tokens of some rows in one list, a prompt once; and where the tokens that count are, and are predicted. */
function pack(rows) {
  const [tokens, predictors, targets, places] = [[], [], [], []];
  let [prompt, first] = [null, 0];
  rows.forEach((row, b) => {
    if (row.prompt !== prompt) {
      [prompt, first] = [row.prompt, tokens.length];
      tokens.push(...prompt.map((id, position) => [id, position, first, 0, first]));
    }
    const own = tokens.length;
    row.ids.forEach((id, t) => {
      if (row.action_mask[t]) {
        predictors.push(t ? own + t - 1 : first + prompt.length - 1);
        targets.push(id);
        places.push([b, t]);
      }
      const is_last = t === row.ids.length - 1; // which predicts nothing
      if (!is_last) tokens.push([id, prompt.length + t, first, prompt.length, own]);
    });
  });
  return { tokens, predictors, targets, places };
}

/** The tensors of a safetensors file of bfloat16 in float32, by name in the order of names. */
export function read_tensors(file) {
  const size = Number(new DataView(file).getBigUint64(0, true));
  const { __metadata__, ...header } = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, size)));
  const read = ({ data_offsets: [start, end] }) => {
    const bits = Uint32Array.from(new Uint16Array(file.slice(8 + size + start, 8 + size + end)), (half) => half << 16);
    return new Float32Array(bits.buffer);
  };
  return Object.fromEntries(Object.keys(header).sort().map((name) => [name, read(header[name])]));
}

/** Items in parts of the given size; the last one can be smaller. */
export function in_groups(items, size) {
  return Array.from({ length: Math.ceil(items.length / size) }, (_, i) => items.slice(i * size, (i + 1) * size));
}
