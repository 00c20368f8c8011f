// The arithmetic of a Llama policy: its layers, their gradients, and AdamW, for WebAssembly with 128-bit SIMD.
//
//     clang --target=wasm32 -O3 -msimd128 -mbulk-memory -nostdlib -Wl,--no-entry,--import-memory,--export=__heap_base \
//         -o kernels.wasm kernels.c
//
// Debian clang 14.0.6 and lld made the committed kernels.wasm. policy.js calls these functions and owns the memory.
// Everything is float32; n counts rows (tokens) unless a comment says otherwise. A function named *_grad gets dy, the
// gradient of the loss by the function's output, and computes those by its inputs.
#include <wasm_simd128.h>

#define API(type, name) __attribute__((export_name(#name))) type name
typedef const float *in;
typedef float *out;
typedef const int *ids;

static v128_t load(in x) { return wasm_v128_load(x); }
static v128_t splat(float x) { return wasm_f32x4_splat(x); }
static v128_t mul(v128_t a, v128_t b) { return wasm_f32x4_mul(a, b); }
static v128_t add(v128_t a, v128_t b) { return wasm_f32x4_add(a, b); }
static v128_t sub(v128_t a, v128_t b) { return wasm_f32x4_sub(a, b); }

// The sum of the four lanes.
static float total(v128_t v) {
  return (wasm_f32x4_extract_lane(v, 0) + wasm_f32x4_extract_lane(v, 1)) +
         (wasm_f32x4_extract_lane(v, 2) + wasm_f32x4_extract_lane(v, 3));
}

// The inner product of two vectors; size is a multiple of 4.
static float dot(int size, in a, in b) {
  v128_t s = splat(0);
  for (int d = 0; d < size; d += 4) s = add(s, mul(load(a + d), load(b + d)));
  return total(s);
}

// y += scale x; size is a multiple of 4.
static void add_scaled(int size, float scale, in x, out y) {
  for (int d = 0; d < size; d += 4) wasm_v128_store(y + d, add(load(y + d), mul(splat(scale), load(x + d))));
}

// e^x, as expf of the Cephes library: 2^n times a polynomial of the rest.
static v128_t vexp(v128_t x) {
  const float c[] = {1.9875691500e-4f, 1.3981999507e-3f, 8.3334519073e-3f,
                     4.1665795894e-2f, 1.6666665459e-1f, 5.0000001201e-1f};
  x = wasm_f32x4_max(wasm_f32x4_min(x, splat(88)), splat(-87));
  v128_t n = wasm_f32x4_nearest(mul(x, splat(1.44269504f)));
  x = sub(x, mul(n, splat(0.693359375f)));  // ln 2, in two parts
  x = sub(x, mul(n, splat(-2.12194440e-4f)));
  v128_t p = splat(c[0]);
  for (int i = 1; i < 6; i++) p = add(mul(p, x), splat(c[i]));
  p = add(add(mul(mul(p, x), x), x), splat(1));
  return mul(p, wasm_i32x4_shl(wasm_i32x4_add(wasm_i32x4_trunc_sat_f32x4(n), wasm_i32x4_splat(127)), 23));
}
static float exp1(float x) { return wasm_f32x4_extract_lane(vexp(splat(x)), 0); }

// Matrix product ------------------------------------------------------------------------------------------------------

enum { ROWS = 4, DEPTH = 512, WIDTH = 128 };  // of the packed blocks, which stay in the cache
static float packed_a[ROWS * DEPTH] __attribute__((aligned(16))), packed_b[DEPTH * WIDTH] __attribute__((aligned(16)));

// ROWS x 8 entries of C, from packed blocks of A and B, over k terms.
static void product_of_blocks(int k, in a, in b, out c, int ldc, int rows, int adds) {
  v128_t s[ROWS][2];
  for (int i = 0; i < ROWS; i++) s[i][0] = s[i][1] = splat(0);
  for (; k > 0; k--, a += ROWS, b += 8) {
    v128_t b0 = load(b), b1 = load(b + 4);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
      v128_t x = wasm_v128_load32_splat(a + i);
      s[i][0] = add(s[i][0], mul(x, b0));
      s[i][1] = add(s[i][1], mul(x, b1));
    }
  }
#pragma unroll
  for (int i = 0; i < ROWS; i++)
    if (i < rows)
      for (int j = 0; j < 2; j++) {
        out p = c + i * ldc + 4 * j;
        wasm_v128_store(p, adds ? add(load(p), s[i][j]) : s[i][j]);
      }
}

// C (m, n) = A (m, k) B (k, n), or added to C if `adds`. Each of A and B has a stride for its rows and one for its
// columns (ar, ac, br, bc), so that either may be transposed. n is a multiple of 8.
API(void, gemm)(int m, int n, int k, in a, int ar, int ac, in b, int br, int bc, out c, int adds) {
  for (int n0 = 0; n0 < n; n0 += WIDTH)
    for (int k0 = 0; k0 < k; k0 += DEPTH) {
      int width = n - n0 < WIDTH ? n - n0 : WIDTH, depth = k - k0 < DEPTH ? k - k0 : DEPTH;
      for (int j = 0; j < width; j += 8)
        if (bc == 1)
          for (int x = 0; x < depth; x++) {
            in p = b + (k0 + x) * br + n0 + j;
            wasm_v128_store(packed_b + j * depth + x * 8, load(p));
            wasm_v128_store(packed_b + j * depth + x * 8 + 4, load(p + 4));
          }
        else
          for (int y = 0; y < 8; y++)
            for (int x = 0; x < depth; x++) packed_b[j * depth + x * 8 + y] = b[(k0 + x) * br + (n0 + j + y) * bc];
      for (int m0 = 0; m0 < m; m0 += ROWS) {
        int rows = m - m0 < ROWS ? m - m0 : ROWS;
        for (int y = 0; y < ROWS; y++)
          for (int x = 0; x < depth; x++) packed_a[x * ROWS + y] = y < rows ? a[(m0 + y) * ar + (k0 + x) * ac] : 0;
        for (int j = 0; j < width; j += 8)
          product_of_blocks(depth, packed_a, packed_b + j * depth, c + m0 * n + n0 + j, n, rows, adds || k0);
      }
    }
}

// Layers --------------------------------------------------------------------------------------------------------------

// y (n, h) = w x / root mean square of x; inv (n) is 1 / root mean square, for the gradient.
API(void, rms_norm)(int n, int h, float eps, in x, in w, out y, out inv) {
  for (int i = 0; i < n; i++, x += h, y += h) {
    float r = inv[i] = 1 / __builtin_sqrtf(dot(h, x, x) / h + eps);
    for (int d = 0; d < h; d++) y[d] = w[d] * (x[d] * r);
  }
}

// Adds to dx and dw.
API(void, rms_norm_grad)(int n, int h, in x, in w, in inv, in dy, out dx, out dw) {
  for (int i = 0; i < n; i++, x += h, dy += h, dx += h) {
    float r = inv[i], s = 0;
    for (int d = 0; d < h; d++) s += dy[d] * w[d] * x[d];
    s *= r * r * r / h;
    for (int d = 0; d < h; d++) dx[d] += r * w[d] * dy[d] - s * x[d], dw[d] += dy[d] * x[d] * r;
  }
}

// A token: its id, its position, and which keys it sees: in all position + 1, the first `shared` of them from the slot
// `first`, which are its prompt's, there once for the rows of a group; the others from the slot `own`.
typedef const struct { int id, position, first, shared, own; } *tokens;

static int slot(tokens t, int j) { return j < t->shared ? t->first + j : t->own + j - t->shared; }

// Turns each head of x (n, heads, size) in place by the angles of its token's position. With sign -1: the gradient.
API(void, rope)(int n, int heads, int size, out x, tokens t, in cos, in sin, float sign) {
  int half = size / 2;
  for (int i = 0; i < n; i++, t++)
    for (int h = 0; h < heads; h++, x += size) {
      in c = cos + t->position * half, s = sin + t->position * half;
      for (int d = 0; d < half; d++) {
        float a = x[d], b = x[d + half];
        x[d] = a * c[d] - b * (sign * s[d]), x[d + half] = b * c[d] + a * (sign * s[d]);
      }
    }
}

// y (n, heads, size) = softmax(q k / sqrt(size)) v. Several query heads share one of `kv` key heads.
// p (n, heads, width) keeps the probabilities for the gradient.
API(void, attention)(int n, int heads, int kv, int size, in q, in k, in v, tokens t, out p, int width, out y) {
  float scale = 1 / __builtin_sqrtf(size);
  for (int i = 0; i < n; i++, t++)
    for (int h = 0; h < heads; h++, q += size, y += size, p += width) {
      int at = h / (heads / kv) * size, row = kv * size;
      float top = -1e30f, sum = 0;
      for (int j = 0; j <= t->position; j++) {
        float x = p[j] = dot(size, q, k + slot(t, j) * row + at) * scale;
        top = x > top ? x : top;
      }
      for (int j = 0; j <= t->position; j++) sum += p[j] = exp1(p[j] - top);
      for (int d = 0; d < size; d++) y[d] = 0;
      for (int j = 0; j <= t->position; j++) add_scaled(size, p[j] /= sum, v + slot(t, j) * row + at, y);
    }
}

// Sets dq and adds to dk and dv; they have the shapes of q, k and v.
API(void, attention_grad)(int n, int heads, int kv, int size, in q, in k, in v, tokens t, in p, int width, in dy,
                          out dq, out dk, out dv) {
  static float dp[4096];  // by each probability; a policy's context is shorter
  float scale = 1 / __builtin_sqrtf(size);
  for (int i = 0; i < n; i++, t++)
    for (int h = 0; h < heads; h++, q += size, dy += size, dq += size, p += width) {
      int at = h / (heads / kv) * size, row = kv * size;
      float mean = 0;
      for (int j = 0; j <= t->position; j++) {
        mean += p[j] * (dp[j] = dot(size, dy, v + slot(t, j) * row + at));
        add_scaled(size, p[j], dy, dv + slot(t, j) * row + at);
      }
      for (int d = 0; d < size; d++) dq[d] = 0;
      for (int j = 0; j <= t->position; j++) {
        float ds = p[j] * (dp[j] - mean) * scale;
        add_scaled(size, ds, k + slot(t, j) * row + at, dq), add_scaled(size, ds, q, dk + slot(t, j) * row + at);
      }
    }
}

// y = silu(g) u, of n numbers; n is a multiple of 4.
API(void, swiglu)(int n, in g, in u, out y) {
  for (int i = 0; i < n; i += 4) {
    v128_t x = load(g + i), e = vexp(wasm_f32x4_neg(x));
    wasm_v128_store(y + i, mul(wasm_f32x4_div(x, add(e, splat(1))), load(u + i)));
  }
}

// Replaces g and u by their gradients.
API(void, swiglu_grad)(int n, out g, out u, in dy) {
  v128_t one = splat(1);
  for (int i = 0; i < n; i += 4) {
    v128_t x = load(g + i), y = load(u + i), d = load(dy + i);
    v128_t s = wasm_f32x4_div(one, add(vexp(wasm_f32x4_neg(x)), one));
    wasm_v128_store(u + i, mul(d, mul(x, s)));
    wasm_v128_store(g + i, mul(d, mul(y, mul(s, add(one, mul(x, sub(one, s)))))));
  }
}

// The sum of the four lanes is added to a float64: to add 1,000 small numbers to 1 in float32 would lose them.
static void add_total(v128_t v, double *sum) {
  v128_t high = wasm_i32x4_shuffle(v, v, 2, 3, 2, 3);
  v128_t s = wasm_f64x2_add(wasm_f64x2_promote_low_f32x4(v), wasm_f64x2_promote_low_f32x4(high));
  *sum += wasm_f64x2_extract_lane(s, 0) + wasm_f64x2_extract_lane(s, 1);
}

// Probabilities in place of the logits x (n, v): p = softmax(x / temperature). entropy (n) is log(sum of e^z) - mean z,
// where z is a logit / temperature minus the largest one; sum and mean are what it needs. v is a multiple of 4.
API(void, softmax)(int n, int v, float temperature, out x, out sum, out mean) {
  for (int i = 0; i < n; i++, x += v) {
    float top = x[0];
    double s = 0, es = 0;
    for (int d = 1; d < v; d++) top = x[d] > top ? x[d] : top;
    for (int d = 0; d < v; d += 4) {
      v128_t z = mul(sub(load(x + d), splat(top)), splat(1 / temperature)), e = vexp(z);
      wasm_v128_store(x + d, e), add_total(e, &s), add_total(mul(e, z), &es);
    }
    sum[i] = s, mean[i] = es / s;
    for (int d = 0; d < v; d += 4) wasm_v128_store(x + d, mul(load(x + d), splat(1 / s)));
  }
}

// The gradient by the logits in place of the probabilities p (n, v), of a loss with the given slope (n) by each
// target's log-prob: slope (1 at the target - p) / temperature.
API(void, log_prob_grad)(int n, int v, float temperature, out p, ids target, in slope) {
  for (int i = 0; i < n; i++, p += v) {
    float s = slope[i] / temperature;
    for (int d = 0; d < v; d += 4) wasm_v128_store(p + d, mul(load(p + d), splat(-s)));
    p[target[i]] += s;
  }
}

// Optimizer -----------------------------------------------------------------------------------------------------------

// The sum of squares of n numbers; not finite if one of them is not.
API(double, square_sum)(int n, in x) {
  double s = 0;
  for (int i = 0; i < n; i++) s += (double)x[i] * x[i];
  return s;
}

// AdamW without weight decay, of n weights: m and v are the moving averages of the gradient and its square. `scale`
// clips the gradient, rate is lr / (1 - beta1^t), root is sqrt(1 - beta2^t).
API(void, adamw)(int n, out w, in g, out m, out v, float rate, double beta1, double beta2, float root, float scale) {
  float new1 = 1 - beta1, new2 = 1 - beta2, old2 = beta2;  // 1 - 0.999 in float32 would be off by 5e-5
  for (int i = 0; i < n; i++) {
    float x = g[i] * scale;
    m[i] += new1 * (x - m[i]), v[i] = old2 * v[i] + new2 * x * x;
    w[i] -= rate * m[i] / (__builtin_sqrtf(v[i]) / root + 1e-8f);
  }
}
