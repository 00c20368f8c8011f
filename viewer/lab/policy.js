// The policy: a Llama model in WebAssembly memory, with the gradient of any loss of its log-probs, and AdamW.
//
// A row is {prompt, ids, action_mask}: the ids of a prompt, and those that follow it, of which action_mask marks the
// tokens that count. Rows of one prompt are adjacent, so that the prompt is computed once.

const MEMORY_PAGES = 3072; // of 64 KiB: 192 MiB, of which a page that is never touched costs nothing
const MICRO_BATCH_TOKENS = 1024; // at the same time in memory, with everything that the gradient needs of them

/** Memory that the kernels compute in; what a scope allocates is free again after it. */
export class Memory {
  constructor(module) {
    this.memory = new WebAssembly.Memory({ initial: MEMORY_PAGES, maximum: MEMORY_PAGES });
    this.kernels = new WebAssembly.Instance(module, { env: { memory: this.memory } }).exports;
    this.next = this.kernels.__heap_base.value;
    this.peak = this.next;
  }

  floats(n) {
    return new Float32Array(this.memory.buffer, this.#take(4 * n), n);
  }

  ints(values) {
    const array = new Int32Array(this.memory.buffer, this.#take(4 * values.length), values.length);
    array.set(values);
    return array;
  }

  #take(bytes) {
    const start = this.next;
    if (start + bytes > this.memory.buffer.byteLength) throw new Error("there is not enough memory for these settings");
    this.next = (start + bytes + 15) & ~15;
    this.peak = Math.max(this.peak, this.next);
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
  /** `config`: of config.json; `weights`: a safetensors file, or a Float32Array of all weights. */
  constructor(memory, config, weights) {
    this.memory = memory;
    this.config = config;
    this.shapes = shapes_of(config);
    this.size = Object.values(this.shapes).reduce((sum, n) => sum + n, 0);
    this.weights = memory.floats(this.size);
    this.w = this.#by_name(this.weights);
    if (weights instanceof Float32Array) this.weights.set(weights);
    else for (const name in this.shapes) this.w[name].set(read_tensor(weights, `model.${name}.weight`));
    [this.cos, this.sin] = rotations(memory, config);
  }

  /** A policy of its own with the same weights, without an optimizer: the reference, for example. */
  copy() {
    return new Policy(this.memory, this.config, this.weights);
  }

  /** Gradients, and the moving averages of AdamW: only the policy that is trained has them. */
  prepare_training() {
    [this.grad, this.m, this.v] = [0, 0, 0].map(() => this.memory.floats(this.size));
    this.g = this.#by_name(this.grad);
    this.updates = 0;
  }

  #by_name(array) {
    let start = 0;
    const entries = Object.entries(this.shapes);
    return Object.fromEntries(entries.map(([name, n]) => [name, array.subarray(start, (start += n))]));
  }

  // ---- layers; a call of a kernel gets addresses

  /** y (n, outputs) = x (n, inputs) W^T, or added to y. */
  #linear(n, x, name, y, outputs, adds = 0) {
    const w = this.w[name];
    const inputs = w.length / outputs;
    this.memory.kernels.gemm(n, outputs, inputs, at(x), inputs, 1, at(w), 1, inputs, at(y), adds);
  }

  /** Adds to the gradient of W, and sets dx or adds to it. */
  #linear_grad(n, x, name, dy, outputs, dx, adds) {
    const [w, g] = [this.w[name], this.g[name]];
    const inputs = w.length / outputs;
    this.memory.kernels.gemm(outputs, inputs, n, at(dy), 1, outputs, at(x), inputs, 1, at(g), 1);
    this.memory.kernels.gemm(n, inputs, outputs, at(dy), outputs, 1, at(w), inputs, 1, at(dx), adds);
  }

  /**
   * The hidden states after the last norm, and everything that `#backward` needs.
   *
   * `tokens`: arrays {ids, position, first, first_end, own, last}, which say what each token sees (see kernels.c).
   * With `caches`, keys and values of token i are put into slot last[i].
   */
  forward(tokens, caches = null) {
    const { memory, w, config } = this;
    const { hidden_size: H, intermediate_size: I, num_attention_heads: A, num_key_value_heads: K, head_dim: D } = config;
    const { rms_norm, rope, attention, swiglu } = memory.kernels;
    const n = tokens.ids.length;
    const t = Object.fromEntries(Object.entries(tokens).map(([name, values]) => [name, memory.ints(values)]));
    const width = Math.max(...tokens.position) + 1;
    const floats = (size) => memory.floats(n * size);
    let h = floats(H);
    tokens.ids.forEach((id, i) => h.set(w.embed_tokens.subarray(id * H, (id + 1) * H), i * H));
    const layers = [];
    for (let l = 0; l < config.num_hidden_layers; l++) {
      const name = `layers.${l}.`;
      const a = { h, inv1: floats(1), norm1: floats(H), q: floats(A * D), k: floats(K * D), v: floats(K * D) };
      rms_norm(n, H, config.rms_norm_eps, at(h), at(w[`${name}input_layernorm`]), at(a.norm1), at(a.inv1));
      this.#linear(n, a.norm1, `${name}self_attn.q_proj`, a.q, A * D);
      this.#linear(n, a.norm1, `${name}self_attn.k_proj`, a.k, K * D);
      this.#linear(n, a.norm1, `${name}self_attn.v_proj`, a.v, K * D);
      rope(n, A, D, at(a.q), at(t.position), at(this.cos), at(this.sin), 1);
      rope(n, K, D, at(a.k), at(t.position), at(this.cos), at(this.sin), 1);
      const { k, v } = caches ? caches[l].put(a, tokens.last) : a;
      Object.assign(a, { p: floats(A * width), attended: floats(A * D), mid: floats(H) });
      const sees = [t.first, t.first_end, t.own, t.last].map(at);
      attention(n, A, K, D, at(a.q), at(k), at(v), ...sees, at(a.p), width, at(a.attended));
      a.mid.set(h);
      this.#linear(n, a.attended, `${name}self_attn.o_proj`, a.mid, H, 1);
      Object.assign(a, { inv2: floats(1), norm2: floats(H), gate: floats(I), up: floats(I), act: floats(I) });
      rms_norm(n, H, config.rms_norm_eps, at(a.mid), at(w[`${name}post_attention_layernorm`]), at(a.norm2), at(a.inv2));
      this.#linear(n, a.norm2, `${name}mlp.gate_proj`, a.gate, I);
      this.#linear(n, a.norm2, `${name}mlp.up_proj`, a.up, I);
      swiglu(n * I, at(a.gate), at(a.up), at(a.act));
      h = floats(H);
      h.set(a.mid);
      this.#linear(n, a.act, `${name}mlp.down_proj`, h, H, 1);
      layers.push(a);
    }
    const inv = floats(1);
    const output = floats(H);
    rms_norm(n, H, config.rms_norm_eps, at(h), at(w.norm), at(output), at(inv));
    return { n, t, width, layers, h, inv, output };
  }

  /** Adds to `grad`, given what `forward` returned and the gradient dy (n, H) by its output. */
  #backward({ n, t, width, layers, h, inv }, dy) {
    const { memory, w, g, config } = this;
    const { hidden_size: H, intermediate_size: I, num_attention_heads: A, num_key_value_heads: K, head_dim: D } = config;
    const { rms_norm_grad, rope, attention_grad, swiglu_grad } = memory.kernels;
    const floats = (size) => memory.floats(n * size).fill(0);
    const [dh, d, d_act] = [floats(H), floats(H), floats(I)];
    const [d_attended, dq, dk, dv] = [floats(A * D), floats(A * D), floats(K * D), floats(K * D)];
    rms_norm_grad(n, H, at(h), at(w.norm), at(inv), at(dy), at(dh), at(g.norm));
    for (let l = config.num_hidden_layers - 1; l >= 0; l--) {
      const name = `layers.${l}.`;
      const a = layers[l];
      const norm_grad = (x, norm, inverse) =>
        rms_norm_grad(n, H, at(x), at(w[name + norm]), at(inverse), at(d), at(dh), at(g[name + norm]));
      this.#linear_grad(n, a.act, `${name}mlp.down_proj`, dh, H, d_act, 0);
      swiglu_grad(n * I, at(a.gate), at(a.up), at(d_act)); // gate and up are now their gradients
      this.#linear_grad(n, a.norm2, `${name}mlp.gate_proj`, a.gate, I, d, 0);
      this.#linear_grad(n, a.norm2, `${name}mlp.up_proj`, a.up, I, d, 1);
      norm_grad(a.mid, "post_attention_layernorm", a.inv2);
      this.#linear_grad(n, a.attended, `${name}self_attn.o_proj`, dh, H, d_attended, 0);
      dk.fill(0);
      dv.fill(0);
      const sees = [t.first, t.first_end, t.own, t.last].map(at);
      const outputs = [dq, dk, dv].map(at);
      attention_grad(n, A, K, D, at(a.q), at(a.k), at(a.v), ...sees, at(a.p), width, at(d_attended), ...outputs);
      rope(n, A, D, at(dq), at(t.position), at(this.cos), at(this.sin), -1);
      rope(n, K, D, at(dk), at(t.position), at(this.cos), at(this.sin), -1);
      this.#linear_grad(n, a.norm1, `${name}self_attn.q_proj`, dq, A * D, d, 0);
      this.#linear_grad(n, a.norm1, `${name}self_attn.k_proj`, dk, K * D, d, 1);
      this.#linear_grad(n, a.norm1, `${name}self_attn.v_proj`, dv, K * D, d, 1);
      norm_grad(a.h, "input_layernorm", a.inv1);
    }
    for (let i = 0; i < n; i++) {
      const start = t.ids[i] * H;
      for (let j = 0; j < H; j++) g.embed_tokens[start + j] += dh[i * H + j];
    }
  }

  /** The probabilities (N, V) of the token that follows each of N hidden states (N, H), and their entropies (N). */
  #head(hidden, N, temperature) {
    const V = this.config.vocab_size;
    const [probs, sum, mean] = [N * V, N, N].map((size) => this.memory.floats(size));
    this.#linear(N, hidden, "embed_tokens", probs, V);
    this.memory.kernels.softmax(N, V, temperature, at(probs), at(sum), at(mean));
    return { probs, entropy: (j) => Math.log(sum[j]) - mean[j] };
  }

  /** Copies of some rows of an (n, H) array. */
  #select(array, indices) {
    const H = this.config.hidden_size;
    const rows = this.memory.floats(indices.length * H);
    indices.forEach((i, j) => rows.set(array.subarray(i * H, (i + 1) * H), j * H));
    return rows;
  }

  /** The probabilities of the next token: an array (V) for each of the given tokens of a forward pass. */
  next_probs({ output }, indices, temperature) {
    const V = this.config.vocab_size;
    const { probs } = this.#head(this.#select(output, indices), indices.length, temperature);
    return indices.map((_, j) => probs.subarray(j * V, (j + 1) * V));
  }

  /**
   * The log-probs and entropies, in nats, of the tokens that count: for each row an array as long as its ids.
   *
   * With `loss`, a function of (the rows of a micro-batch, their log-probs, their entropies) that returns the slopes of
   * the loss by every log-prob, the gradient is added to `grad`.
   */
  score(rows, temperature, loss = null) {
    const parts = micro_batches(rows).map((micro) => this.memory.scope(() => this.#score(micro, temperature, loss)));
    return { log_probs: parts.flatMap((part) => part.log_probs), entropy: parts.flatMap((part) => part.entropy) };
  }

  #score(rows, temperature, loss) {
    const { hidden_size: H, vocab_size: V } = this.config;
    const { tokens, predictors, targets, places } = pack(rows);
    const N = targets.length;
    const pass = this.forward(tokens);
    const hidden = this.#select(pass.output, predictors);
    const { probs, entropy: entropy_of } = this.#head(hidden, N, temperature);
    const [log_probs, entropy] = [0, 0].map(() => rows.map((row) => new Float64Array(row.ids.length)));
    places.forEach(([b, t], j) => {
      log_probs[b][t] = Math.log(probs[j * V + targets[j]]);
      entropy[b][t] = entropy_of(j);
    });
    if (loss) {
      const slopes = loss(rows, log_probs, entropy);
      const slope = this.memory.floats(N);
      places.forEach(([b, t], j) => (slope[j] = slopes[b][t]));
      this.memory.kernels.log_prob_grad(N, V, temperature, at(probs), at(this.memory.ints(targets)), at(slope));
      const d_hidden = this.memory.floats(N * H);
      this.#linear_grad(N, hidden, "embed_tokens", probs, V, d_hidden, 0);
      const dy = this.memory.floats(pass.n * H).fill(0);
      predictors.forEach((i, j) => {
        for (let d = 0; d < H; d++) dy[i * H + d] += d_hidden[j * H + d];
      });
      this.#backward(pass, dy);
    }
    return { log_probs, entropy };
  }

  // ---- optimizer

  zero_grad() {
    this.grad.fill(0);
  }

  grad_norm() {
    return Math.sqrt(this.memory.kernels.square_sum(this.size, at(this.grad)));
  }

  /** A step of AdamW, without weight decay, down the gradient times `scale`. */
  optimizer_step(lr, scale, beta1 = 0.9, beta2 = 0.999) {
    this.updates += 1;
    const [rate, root] = [lr / (1 - beta1 ** this.updates), Math.sqrt(1 - beta2 ** this.updates)];
    const arrays = [this.weights, this.grad, this.m, this.v].map(at);
    this.memory.kernels.adamw(this.size, ...arrays, rate, beta1, beta2, root, scale);
  }

  is_finite() {
    return Number.isFinite(this.memory.kernels.square_sum(this.size, at(this.weights)));
  }

  /** A hash of all bits of the weights. */
  checksum() {
    let sum = 0;
    for (const word of new Uint32Array(this.memory.memory.buffer, this.weights.byteOffset, this.size))
      sum = (Math.imul(sum, 31) + word) >>> 0;
    return sum.toString(16).padStart(8, "0");
  }
}

const at = (array) => array.byteOffset;

/** The number of weights of each tensor, by its name without `model.` and `.weight`. */
function shapes_of(config) {
  const { hidden_size: H, intermediate_size: I, vocab_size: V, head_dim: D } = config;
  const [q, kv] = [config.num_attention_heads * D, config.num_key_value_heads * D];
  const shapes = { embed_tokens: V * H };
  for (let l = 0; l < config.num_hidden_layers; l++) {
    const layer = { "self_attn.q_proj": q * H, "self_attn.k_proj": kv * H, "self_attn.v_proj": kv * H };
    Object.assign(layer, { "self_attn.o_proj": H * q, "mlp.gate_proj": I * H, "mlp.up_proj": I * H });
    Object.assign(layer, { "mlp.down_proj": H * I, input_layernorm: H, post_attention_layernorm: H });
    for (const name in layer) shapes[`layers.${l}.${name}`] = layer[name];
  }
  return { ...shapes, norm: H };
}

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

/** Rows in the order given, a few at a time: as many as fit into the memory of a micro-batch. */
function micro_batches(rows) {
  const batches = [];
  let num_tokens = Infinity;
  let prompt = null;
  for (const row of rows) {
    num_tokens += row.ids.length + (row.prompt === prompt ? 0 : row.prompt.length);
    if (num_tokens > MICRO_BATCH_TOKENS) {
      batches.push([]);
      num_tokens = row.prompt.length + row.ids.length;
    }
    batches.at(-1).push(row);
    prompt = row.prompt;
  }
  return batches;
}

/** All tokens of some rows in one list, a prompt once; and where the tokens that count are, and are predicted. */
function pack(rows) {
  const tokens = empty_tokens();
  const [predictors, targets, places] = [[], [], []];
  let [prompt, start, end] = [null, 0, 0];
  rows.forEach((row, b) => {
    if (row.prompt !== prompt) {
      prompt = row.prompt;
      start = tokens.ids.length;
      end = start + prompt.length;
      prompt.forEach((id, position) => add_token(tokens, id, position, start, -1, start, start + position));
    }
    const own = tokens.ids.length;
    row.ids.forEach((id, t) => {
      if (row.action_mask[t]) {
        predictors.push(t ? own + t - 1 : end - 1);
        targets.push(id);
        places.push([b, t]);
      }
      // the last token predicts nothing
      if (t < row.ids.length - 1) add_token(tokens, id, prompt.length + t, start, end, own, own + t);
    });
  });
  return { tokens, predictors, targets, places };
}

export function empty_tokens() {
  return { ids: [], position: [], first: [], first_end: [], own: [], last: [] };
}

/** A token at a position, which sees the slots [first, first_end) and [own, last]; its own slot is `last`. */
export function add_token(tokens, id, position, first, first_end, own, last) {
  const token = { ids: id, position, first, first_end, own, last };
  for (const name in token) tokens[name].push(token[name]);
}

/** A tensor of a safetensors file, in float32. */
function read_tensor(file, name) {
  const size = Number(new DataView(file).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, size)));
  const { dtype, data_offsets } = header[name];
  const bytes = file.slice(...data_offsets.map((offset) => 8 + size + offset));
  if (dtype === "F32") return new Float32Array(bytes);
  return new Float32Array(Uint32Array.from(new Uint16Array(bytes), (bits) => bits << 16).buffer); // bfloat16
}
