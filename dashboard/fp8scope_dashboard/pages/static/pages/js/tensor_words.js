// Numbers as the pages write them; the same rules as formatting.py.

const THIN = "\u202f";
const MINUS = "\u2212";
const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

export const superscript = (exponent) => [...String(exponent)].map((digit) => SUPERSCRIPTS[digit]).join("");

export const wholeNumber = (value) => String(Math.round(value)).replace(/\B(?=(\d{3})+(?!\d))/g, THIN);

export const percent = (fraction, signed = false) => {
  if (fraction === null || Number.isNaN(fraction)) return "–";
  const size = Math.abs(100 * fraction);
  const sign = fraction < 0 ? MINUS : signed ? (fraction > 0 ? "+" : "±") : "";
  if (size === 0) return `${sign}0${THIN}%`;
  if (size < 0.001) return `${signed ? sign : ""}< 0.001${THIN}%`;
  const digits = size < 0.1 ? 3 : size < 10 ? 2 : size < 1000 ? 1 : 0;
  return `${sign}${size.toFixed(digits)}${THIN}%`;
};

// Four significant digits, without an exponent where possible.
export const plain = (value) => {
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : value > 0 ? "+∞" : `${MINUS}∞`;
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e9)) {
    const [mantissa, exponent] = value.toExponential(2).split("e");
    return `${mantissa.replace("-", MINUS)}×10${superscript(Number(exponent))}`;
  }
  if (size >= 1e4) return `${value < 0 ? MINUS : ""}${wholeNumber(size)}`;
  return String(Number(value.toPrecision(4))).replace(/^-/, MINUS);
};

// The steps from one edge up to the next.
export const spans = (first, end) => (end - first <= 1 ? `step ${wholeNumber(first)}` : `steps ${wholeNumber(first)}–${wholeNumber(end - 1)}`);
