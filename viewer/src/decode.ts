// Columns as Python packed them: base64 of deflated numbers, by bytes.

export type Bytes = Uint8Array<ArrayBuffer>;

export function fromBase64(text: string): Bytes {
  const known = Uint8Array as unknown as { fromBase64?: (text: string) => Bytes };
  if (known.fromBase64) return known.fromBase64(text);
  const letters = atob(text);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  return bytes;
}

export async function inflate(bytes: Bytes): Promise<Bytes> {
  if (bytes.length === 0) return bytes;
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** `count` numbers: all lowest bytes, then all second bytes, ... up to the highest that is used. */
export function asUint32(planes: Uint8Array, count: number): Uint32Array<ArrayBuffer> {
  const found = new Uint32Array(count);
  const [second, third, fourth] = [count, 2 * count, 3 * count];
  // A loop for each width: they run over millions of numbers while somebody waits.
  if (planes.length === count) found.set(planes);
  else if (planes.length === third) {
    for (let i = 0; i < count; i++) found[i] = planes[i] | (planes[second + i] << 8);
  } else if (planes.length === fourth) {
    for (let i = 0; i < count; i++) {
      found[i] = planes[i] | (planes[second + i] << 8) | (planes[third + i] << 16);
    }
  } else if (planes.length > fourth) {
    for (let i = 0; i < count; i++) {
      const low = planes[i] | (planes[second + i] << 8);
      found[i] = low | (planes[third + i] << 16) | (planes[fourth + i] << 24);
    }
  }
  return found;
}

/** The same for numbers of up to seven bytes. */
export function asNumbers(planes: Uint8Array, count: number): Float64Array<ArrayBuffer> {
  const found = new Float64Array(count);
  for (let from = 0, worth = 1; from < planes.length; from += count, worth *= 256) {
    for (let i = 0; i < count; i++) found[i] += planes[from + i] * worth;
  }
  return found;
}

/** 0, 1, 2, 3, ... as 0, -1, 1, -2, ... */
export const unfolded = (value: number) => (value >>> 1) ^ -(value & 1);
