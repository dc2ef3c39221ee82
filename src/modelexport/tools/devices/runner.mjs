// Runs the parts of a kit with onnxruntime-web: `node runner.mjs [wasm]`, or index.html in a browser (wasm, webgpu).
// It gives what runner.py writes: results.json for `modelexport verify FILE --results results.json`.

const ARRAYS = {
  float32: Float32Array, float64: Float64Array, float16: Uint16Array, int64: BigInt64Array, uint64: BigUint64Array,
  int32: Int32Array, uint32: Uint32Array, int16: Int16Array, uint16: Uint16Array, int8: Int8Array, uint8: Uint8Array,
  bool: Uint8Array,
};

function half(bits) {
  const [sign, exponent, rest] = [bits & 0x8000 ? -1 : 1, (bits >> 10) & 31, bits & 1023];
  if (exponent === 31) return rest ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + rest / 1024) : 2 ** -14 * (rest / 1024));
}

// The norm of the difference as a share of that of the right array; null if it cannot be compared.
export function errorOf(value, right, tensor) {
  if (value.shape.join() !== tensor.dims.join()) return null;
  const number = value.dtype === "float16" && !(right[0] % 1) ? half : Number;
  const wide = ["bool", "int32", "uint32", "int64", "uint64"].includes(value.dtype);
  let [size, apart, unequal] = [0, 0, 0];
  for (let i = 0; i < right.length; i++) {
    const [a, b] = [number(right[i]), number(tensor.data[i])];
    unequal += a !== b;
    if (Math.abs(a) < 1e30) {
      size += a * a;
      apart += (a - b) ** 2;
    } else if (!(Math.sign(a) === Math.sign(b) && Math.abs(b) >= 6e4) && !(Number.isNaN(a) && Number.isNaN(b))) return null;
  }
  if (wide) return right.length ? unequal / right.length : 0;
  const error = Math.sqrt(apart) / (size ? Math.sqrt(size) : 1);
  return Number.isFinite(error) ? error : null;
}

async function runPart(ort, read, part, provider) {
  const load = async (value) => new ARRAYS[value.dtype]((await read(value.value)).slice().buffer);
  const began = performance.now();
  const session = await ort.InferenceSession.create(await read(part.file), { executionProviders: [provider] });
  const loaded = performance.now();
  const feeds = {};
  for (const value of part.inputs) feeds[value.name] = new ort.Tensor(value.dtype, await load(value), value.shape);
  await session.run(feeds);
  const warm = performance.now();
  const results = await session.run(feeds);
  const seconds = (performance.now() - warm) / 1000;
  const errors = {};
  for (const value of part.outputs) errors[value.name] = errorOf(value, await load(value), results[value.name]);
  await session.release();
  return { status: "ran", errors, load_seconds: (loaded - began) / 1000, seconds };
}

export async function runKit(ort, read, provider, about, tell = () => {}) {
  const kit = JSON.parse(new TextDecoder().decode(await read("kit.json")));
  const parts = {};
  for (const part of kit.parts) {
    tell(part.name);
    try {
      parts[part.name] = await runPart(ort, read, part, provider);
    } catch (error) {
      parts[part.name] = { status: "failed", message: String(error).slice(0, 600) };
    }
  }
  return { kit: kit.kit, device: { name: provider, provider, version: about }, parts };
}

if (typeof process !== "undefined" && process.argv[1]?.endsWith("runner.mjs")) {
  const files = await import("node:fs/promises");
  const ort = await import("onnxruntime-web");
  const provider = process.argv[2] ?? "wasm";
  const read = async (name) => new Uint8Array(await files.readFile(new URL(name, import.meta.url)));
  const results = await runKit(ort.default ?? ort, read, provider, `onnxruntime-web in Node ${process.version}`);
  await files.writeFile(new URL("results.json", import.meta.url), JSON.stringify(results, null, 1));
}
