(() => {
"use strict";
// Every figure draws with a pen of few strokes; one pen paints a canvas, the other writes an SVG for saving.
// Text from data becomes text nodes and nothing else.
const RUNS = JSON.parse(document.getElementById("data").textContent);
const KINDS = ["personal", "global", "pooled", "local", "unknown"];
const MODELS = ["local", "global", "pooled", "personal"];
const SERIES = ["global", "local", "personal", "unknown"];
const DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
const OVER = other => `improvement_over_${other}_pct`;
const FIRST = ["client", "recommended", "lowest", OVER("local"), OVER("global"), "confidence", "rows", ...MODELS];
const PAGE = 25, NAMED = 300, MANY = 1500, FAR = 8, ROWS_SHOWN = 200, LABELLED = 60, FARTHEST_LABELLED = 20, WIDE = 5;
const TURN = Math.PI * (3 - Math.sqrt(5));  // the golden angle spreads boats of like distance all around
const figures = [];

const known = x => typeof x === "number" && isFinite(x);
const clamp = (x, low, high) => Math.min(Math.max(x, low), high);
const shades = {};  // of the theme, emptied when it changes: asking the style for each of many marks is slow
const color = name => shades[name] ??= getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
const colorOf = kind => color(KINDS.includes(kind) ? kind : "unknown");
const median = values => { const s = [...values].sort((a, b) => a - b); return s.length ? s[s.length >> 1] : 0; };
const quantile = (values, q) => { const s = [...values].sort((a, b) => a - b); return s[Math.floor(q * (s.length - 1))]; };
function number(x, digits = 4) {
  if (x === null || x === undefined || x === "") return "-";
  if (typeof x === "boolean") return x ? "yes" : "no";
  if (typeof x !== "number") return String(x);
  if (Number.isInteger(x) && Math.abs(x) < 1e15) return x.toLocaleString("en");
  const size = Math.abs(x);
  return size >= 1e4 && size < 1e9 ? Math.round(x).toLocaleString("en") : String(Number(x.toPrecision(digits)));
}
// Improvements in percent: positive is a lower loss.
const magnitude = x => x >= 100 ? Math.round(x).toLocaleString("en") : x >= 99.95 ? Math.min(x, 99.99).toFixed(2) : x.toFixed(1);
const direction = x => known(x) ? `${magnitude(Math.abs(x))}% ${x >= 0 ? "lower" : "higher"}` : "-";
const probability = x => known(x) ? (x > 0.99 ? "over 0.99" : x < 0.01 ? "under 0.01" : x.toFixed(2)) : "-";
// An end of an interval never rounds to 0 or to 100.
const end = x => x >= 99.5 && x < 100 ? String(Number(Math.min(x, 99.99).toPrecision(4))) : x === 0 || Math.abs(x) >= .5 ? Math.round(x).toLocaleString("en") : Math.abs(x) >= .01 ? String(Number(x.toPrecision(1))) : x > 0 ? "0.01" : "-0.01";
function side(run, other, i, interval = true) {
  const c = run.clients, value = c[OVER(other)]?.[i], low = c[OVER(other) + "_ci_low"]?.[i], high = c[OVER(other) + "_ci_high"]?.[i];
  if (!known(value)) return "-";
  if (c.recommended?.[i] === other) return "same model";
  if (low === 0 && high === 0 && value === 0) return "no difference";
  return direction(value) + (interval && known(low) && known(high) ? ` (${end(low)} to ${end(high)})` : "");
}
function make(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value !== false && value !== null) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}
function save(name, data, type) {
  const at = URL.createObjectURL(data instanceof Blob ? data : new Blob([data], { type }));
  make("a", { href: at, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(at), 10000);
}
// A spreadsheet would run text that begins like a formula: an apostrophe keeps it text. Numbers stay numbers.
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? "'" + value : value;
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
const csv = (heads, rows) => [heads, ...rows].map(row => row.map(cell).join(",")).join("\r\n") + "\r\n";
const fileName = (run, part, ending) => `${run.name}-${part}.${ending}`.replace(/[^\w.-]+/g, "-");

function canvasPen(context) {
  const set = o => {
    context.globalAlpha = o.alpha ?? 1;
    context.setLineDash(o.dash ?? []);
    context.lineWidth = o.width ?? 1;
  };
  const finish = o => {
    if (o.fill) { context.fillStyle = o.fill; context.fill(); }
    if (o.stroke) { context.strokeStyle = o.stroke; context.stroke(); }
  };
  return {
    poly(points, o) {
      set(o);
      context.beginPath();
      points.forEach(([x, y], k) => k ? context.lineTo(x, y) : context.moveTo(x, y));
      if (o.closed) context.closePath();
      finish(o);
    },
    circle(x, y, r, o) { set(o); context.beginPath(); context.arc(x, y, r, 0, 2 * Math.PI); finish(o); },
    text(x, y, words, o) {
      context.globalAlpha = 1;
      context.font = `${o.size ?? 12}px system-ui, sans-serif`;
      context.textAlign = { start: "left", middle: "center", end: "right" }[o.anchor ?? "start"];
      context.textBaseline = "middle";
      context.fillStyle = o.fill;
      context.save();
      context.translate(x, y);
      if (o.turn) context.rotate(-Math.PI / 2);
      context.fillText(words, 0, 0);
      context.restore();
    },
  };
}
function svgPen(parts) {
  const clean = text => String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`).replace(/[\x00-\x08\x0b\x0c\x0e-\x1f]/g, " ");
  const at = x => Number(x.toFixed(2));
  const look = o => `fill="${o.fill || "none"}" stroke="${o.stroke || "none"}" stroke-width="${o.width ?? 1}"` +
    (o.alpha !== undefined ? ` opacity="${at(o.alpha)}"` : "") + (o.dash?.length ? ` stroke-dasharray="${o.dash.join(" ")}"` : "");
  return {
    poly: (points, o) => parts.push(`<path d="M${points.map(([x, y]) => `${at(x)} ${at(y)}`).join("L")}${o.closed ? "Z" : ""}" ${look(o)}/>`),
    circle: (x, y, r, o) => parts.push(`<circle cx="${at(x)}" cy="${at(y)}" r="${at(r)}" ${look(o)}/>`),
    text: (x, y, words, o) => parts.push(`<text x="${at(x)}" y="${at(y)}" dy=".35em" font-size="${o.size ?? 12}" ` +
      `font-family="sans-serif" text-anchor="${o.anchor ?? "start"}" fill="${o.fill}"` +
      `${o.turn ? ` transform="rotate(-90 ${at(x)} ${at(y)})"` : ""}>${clean(words)}</text>`),
  };
}

// A figure: a canvas with what it says as text, what the pointer or the arrow keys are at, its data, and copies to save.
function figure(run, host, spec) {
  const canvas = make("canvas", { role: "img", tabindex: spec.marks === false ? null : "0" });
  const readout = make("p", { class: "readout" });
  const caption = make("figcaption");
  const body = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": `Data of: ${spec.title}` });
  const data = make("details", { ontoggle: fill }, make("summary", {}, "Data"), body);
  const tools = make("div", { class: "tools" },
    make("button", { type: "button", onclick: () => save(fileName(run, spec.name, "csv"), csv(...spec.data()), "text/csv") }, "CSV"),
    make("button", { type: "button", onclick: saveSvg }, "SVG"),
    make("button", { type: "button", onclick: () => canvas.toBlob(blob => save(fileName(run, spec.name, "png"), blob)) }, "PNG"));
  host.append(make("figure", {}, canvas, spec.marks === false ? "" : readout, caption), tools, data);
  let base = null, marks = [], width = 0, height = 0, place = spec.at;  // `at`: places of its own, not clients
  const at = () => spec.at === undefined ? run.picked : place;
  const go = i => { if (spec.at === undefined) run.pick(i); else { place = i; show(); } };
  const size = () => [Math.max(canvas.clientWidth, 260), spec.height(Math.max(canvas.clientWidth, 260))];

  function fill() {
    if (!data.open) return;
    const [heads, rows] = spec.data();
    const table = make("table", { class: "plain" },
      make("thead", {}, make("tr", {}, ...heads.map(h => make("th", { scope: "col" }, h)))),
      make("tbody", {}, ...rows.slice(0, ROWS_SHOWN).map(row => make("tr", {}, ...row.map(x => make("td", { class: typeof x === "number" ? "number" : false }, number(x)))))));
    body.replaceChildren(table, ...(rows.length > ROWS_SHOWN ? [make("p", {}, `The first ${ROWS_SHOWN} of ${number(rows.length)} rows; the CSV has all.`)] : []));
  }
  function saveSvg() {
    const parts = [];
    const [w, h] = size(), pen = svgPen(parts);
    spec.draw(pen, w, h);
    spec.over?.(pen, marks, at());
    save(fileName(run, spec.name, "svg"), `<svg xmlns="http://www.w3.org/2000/svg" width="${w}" height="${h}" viewBox="0 0 ${w} ${h}">` +
      `<rect width="100%" height="100%" fill="${color("panel")}"/>${parts.join("")}</svg>`, "image/svg+xml");
  }
  function paint() {
    [width, height] = size();
    const ratio = window.devicePixelRatio || 1;
    base = document.createElement("canvas");
    for (const one of [base, canvas]) { one.width = Math.round(width * ratio); one.height = Math.round(height * ratio); }
    canvas.style.height = `${height}px`;
    const context = base.getContext("2d");
    context.scale(ratio, ratio);
    marks = spec.draw(canvasPen(context), width, height) || [];
    show();
  }
  function show() {
    const context = canvas.getContext("2d"), ratio = window.devicePixelRatio || 1;
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.globalAlpha = 1;
    context.clearRect(0, 0, canvas.width, canvas.height);
    context.drawImage(base, 0, 0);
    context.scale(ratio, ratio);
    spec.over?.(canvasPen(context), marks, at());
    const words = spec.describe();
    canvas.setAttribute("aria-label", `${spec.title}. ${words}`);
    caption.textContent = words;
    if (spec.marks !== false) readout.textContent = spec.say(at());
    if (data.open && spec.lively) fill();
  }
  function nearest(event) {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, y = event.clientY - box.top;
    let best = null, least = 28 ** 2;
    for (const mark of marks) {
      const away = (mark.x - x) ** 2 + (spec.upright ? 0 : (mark.y - y) ** 2);
      if (away < least) { least = away; best = mark; }
    }
    return best;
  }
  if (spec.marks !== false) {
    canvas.addEventListener("pointermove", event => { const near = nearest(event); readout.textContent = spec.say(near ? near.i : at()); });
    canvas.addEventListener("pointerleave", () => { readout.textContent = spec.say(at()); });
    canvas.addEventListener("click", event => { const near = nearest(event); if (near) go(near.i); });
    canvas.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step || !marks.length) return;
      event.preventDefault();
      const now = marks.findIndex(mark => mark.i === at());
      go(marks[(now + step + marks.length) % marks.length].i);
    });
  }
  figures.push(paint);
  new ResizeObserver(() => { if (Math.abs(size()[0] - width) > 1) paint(); }).observe(canvas);
  paint();
  return { paint, show };
}

function ticks(low, high, most = 6) {
  const rough = (high - low) / most, power = 10 ** Math.floor(Math.log10(rough)), part = rough / power;
  const step = power * (part > 5 ? 10 : part > 2 ? 5 : part > 1 ? 2 : 1), out = [];
  for (let x = Math.ceil(low / step - 1e-9) * step; x <= high + step * 1e-9; x += step) out.push(Math.abs(x) < step * 1e-9 ? 0 : x);
  return out;
}
function logTicks(low, high) {
  const out = [], from = Math.floor(Math.log10(low)), to = Math.ceil(Math.log10(high)), every = Math.ceil((to - from) / 7);
  for (let k = from; k <= to; k += every) if (10 ** k >= low * 0.999 && 10 ** k <= high * 1.001) out.push(10 ** k);
  return out.length > 1 ? out : [low, high];
}
// 1, 2 and 5 times powers of ten, or powers alone where they are many.
function fineTicks(low, high) {
  if (high / low > 1000) return logTicks(low, high);
  const out = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.log10(high); k++) for (const part of [1, 2, 5]) if (part * 10 ** k >= low && part * 10 ** k <= high) out.push(part * 10 ** k);
  return out.length > 1 ? out : [low, high];
}
const isWide = values => { const some = values.filter(known), low = Math.min(...some); return low > 0 && Math.max(...some) >= WIDE * low; };
// Axes inside a frame; the scales take numbers to places.
function axes(pen, w, h, o) {
  const left = o.left ?? 58, right = w - 12, top = o.top ?? 12, bottom = h - 44;
  const scale = (low, high, a, b, log) => log
    ? x => a + (b - a) * (Math.log(x) - Math.log(low)) / (Math.log(high) - Math.log(low) || 1)
    : x => a + (b - a) * (x - low) / (high - low || 1);
  const x = scale(...o.x, left, right, o.logx), y = scale(...o.y, bottom, top, o.logy);
  const ink = color("soft"), line = color("line");
  for (const tick of o.logy ? fineTicks(...o.y) : ticks(...o.y, Math.max(2, Math.floor((bottom - top) / 50)))) {
    pen.poly([[left, y(tick)], [right, y(tick)]], { stroke: line });
    pen.text(left - 6, y(tick), number(tick), { anchor: "end", fill: ink });
  }
  if (o.xticks !== false) for (const tick of o.logx ? logTicks(...o.x) : ticks(...o.x, Math.max(2, Math.floor((right - left) / 90)))) {
    pen.poly([[x(tick), bottom], [x(tick), bottom + 4]], { stroke: ink });
    pen.text(clamp(x(tick), left, right - 8), bottom + 13, number(tick, 2), { anchor: "middle", fill: ink });
  }
  pen.text((left + right) / 2, h - 10, o.xlabel, { anchor: "middle", fill: ink });
  pen.text(11, (top + bottom) / 2, o.ylabel, { anchor: "middle", fill: ink, turn: true });
  return { x, y, left, right, top, bottom };
}
// Marks differ by shape as well as by color: a sail for personal, a disc for global, a square for local, a ring if undecided.
function mark(pen, kind, x, y, s, alpha, open) {
  const fill = colorOf(kind);
  const o = open || kind === "unknown" || !KINDS.includes(kind) ? { stroke: fill, width: 1.6, alpha } : { fill, alpha };
  if (kind === "personal") pen.poly([[x, y - 1.25 * s], [x + s, y + .75 * s], [x - s, y + .75 * s]], { ...o, closed: true });
  else if (kind === "local") pen.poly([[x - .85 * s, y - .85 * s], [x + .85 * s, y - .85 * s], [x + .85 * s, y + .85 * s], [x - .85 * s, y + .85 * s]], { ...o, closed: true });
  else pen.circle(x, y, .95 * s, o);
}
function boat(pen, kind, x, y, s, alpha, open) {
  const hull = [[-1.3, .35], [1.3, .35], [.8, 1.05], [-.8, 1.05]].map(([a, b]) => [x + a * s, y + b * s]);
  pen.poly(hull, { fill: colorOf(kind), alpha, closed: true });
  mark(pen, kind, x, y - .5 * s, .62 * s, alpha, open);
}
function legend(run) {
  const list = make("ul", { class: "legend" });
  const count = {};
  for (const kind of run.kinds) count[kind] = (count[kind] || 0) + 1;
  for (const kind of [...KINDS, ""].filter(k => count[k])) {
    const parts = [];
    mark(svgPen(parts), kind, 8, 8, 6, 1);
    const art = new DOMParser().parseFromString(`<svg xmlns="http://www.w3.org/2000/svg" width="16" height="16" aria-hidden="true">${parts.join("")}</svg>`, "image/svg+xml");
    list.append(make("li", {}, document.importNode(art.documentElement, true), `${kind || "no test rows"} (${number(count[kind])})`));
  }
  return list;
}
function drawLegend(run, host) {
  let list = legend(run);
  host.append(list);
  figures.push(() => { const fresh = legend(run); list.replaceWith(fresh); list = fresh; });
}

// Names beside their marks, as far as they hide nothing: to the right, the left, above or below; of many clients, the farthest ones.
function labelBoats(pen, places, size, w, h) {
  const taken = places.map(p => [p.x - size - 2, p.y - size - 2, p.x + size + 2, p.y + size + 2]);
  taken.push([w / 2 - 40, h / 2 - 11, w / 2 + 40, h / 2 + 30]);
  for (const p of places.length > LABELLED ? places.slice(-FARTHEST_LABELLED).reverse() : places) {
    const text = p.text.length > 22 ? p.text.slice(0, 21) + "…" : p.text, wide = 6.1 * text.length, off = 1.4 * size + 4;
    const spots = [[p.x + off, p.y, "start"], [p.x - off, p.y, "end"], [p.x, p.y - 1.6 * size - 8, "middle"], [p.x, p.y + 1.5 * size + 9, "middle"]];
    for (const [x, y, anchor] of spots) {
      const left = anchor === "start" ? x : anchor === "end" ? x - wide : x - wide / 2, box = [left, y - 7, left + wide, y + 7];
      if (box[0] < 2 || box[2] > w - 2 || box[1] < 2 || box[3] > h - 2) continue;
      if (taken.some(t => t[0] < box[2] && t[2] > box[0] && t[1] < box[3] && t[3] > box[1])) continue;
      pen.text(x, y, text, { anchor, fill: color("ink"), size: 11 });
      taken.push(box);
      break;
    }
  }
}

function mooring(run, host) {
  const c = run.clients, m = run.count, far = c.distance, order = [];
  if (!far || !far.some(known)) {
    host.append(make("p", {}, "The run holds no personal models to measure distances with."));
    return null;
  }
  order.push(...run.all.filter(i => known(far[i])).sort((a, b) => far[a] - far[b] || a - b));
  const distances = order.map(i => far[i]), most = Math.max(...distances), usual = quantile(distances, .98);
  const limit = m < 20 || most <= 1.6 * usual || usual === 0 ? most : 1.15 * usual;
  const beyond = distances.filter(d => d > limit).length;
  const stiff = i => known(c.lam?.[i]) && c.lam[i] > 0 ? Math.log(c.lam[i]) : known(c.alpha?.[i]) ? 1 - c.alpha[i] : null;
  const all = order.map(stiff).filter(known), low = Math.min(...all), high = Math.max(...all);
  const tight = i => { const s = stiff(i); return s === null ? 0 : high > low ? (s - low) / (high - low) : .4; };
  let size = 0;
  drawLegend(run, host);
  return figure(run, host, {
    name: "mooring", title: "The mooring picture",
    height: w => clamp(w, 300, 560),
    describe: () => `Each client is a boat moored to a buoy, the global model: its distance is how far its ${run.recommends ? "recommended" : "personal"} model is from the global one ` +
      `(up to ${number(most, 3)}, half of them within ${number(median(distances), 3)}). ` +
      (all.length ? "The thicker the line, the larger lambda. " : "") +
      (run.recommends ? "Shape and color show the recommended model; paler is lower confidence." : "Shape and color show the model with the lowest test loss.") +
      (beyond ? ` Beyond the rim, drawn open on it: ${number(beyond)}.` : ""),
    say: i => i === null ? "" : `${c.client[i]}: distance ${number(far[i], 3)}${known(c.lam?.[i]) ? `, lambda ${number(c.lam[i], 3)}` : ""}, ${run.kinds[i]}${c.confidence ? `, ${c.confidence[i]} confidence` : ""}`,
    data: () => run.table(["client", "recommended", "lowest", "confidence", "distance", "lam", "alpha"], order),
    draw(pen, w, h) {
      size = clamp(.16 * Math.min(w, h) / Math.sqrt(m), 2.2, 12);
      const x0 = w / 2, y0 = h / 2, radius = Math.min(w, h) / 2 - 22, soft = color("soft"), line = color("line");
      for (const tick of most > 0 ? ticks(0, limit, 4).slice(1) : []) {
        const r = 16 + (radius - 16) * tick / limit;
        pen.circle(x0, y0, r, { stroke: line, dash: [3, 4] });
        pen.text(x0 + 4, y0 - r - 7, number(tick, 3), { fill: soft, size: 11 });
      }
      const places = order.map((i, k) => {
        const angle = TURN * k;
        const r = 16 + (radius - 16) * (most > 0 ? Math.min(far[i] / limit, 1) : .25);
        return { i, x: x0 + r * Math.cos(angle), y: y0 + r * Math.sin(angle), open: far[i] > limit };
      });
      const thin = m > MANY ? .25 : m > NAMED ? .5 : 1;
      for (const p of places) pen.poly([[x0, y0], [p.x, p.y]],
        { stroke: colorOf(run.kinds[p.i]), width: thin * (.5 + 3.5 * tight(p.i)), alpha: (m > MANY ? .2 : .45) * (.35 + .65 * run.certain(p.i)) });
      for (const p of places) (m > NAMED ? mark : boat)(pen, run.kinds[p.i], p.x, p.y, size, .3 + .7 * run.certain(p.i), p.open);
      if (m <= LABELLED) pen.text(x0, y0 + 22, "global model", { anchor: "middle", fill: soft, size: 11 });
      labelBoats(pen, places.map(p => ({ ...p, text: String(c.client[p.i]) })), size, w, h);
      pen.circle(x0, y0, 9, { fill: color("panel"), stroke: color("ink"), width: 2 });
      pen.circle(x0, y0, 4, { fill: color("ink") });
      return places;
    },
    over(pen, marks) {
      const p = marks.find(one => one.i === run.picked);
      if (p) pen.circle(p.x, p.y, size + 5, { stroke: color("ink"), width: 2.5 });
    },
  });
}

function improvementsFigure(run, host) {
  const c = run.clients, key = OVER("local"), values = c[key], lows = c[key + "_ci_low"], highs = c[key + "_ci_high"];
  const order = run.all.filter(i => known(values?.[i])).sort((a, b) => values[b] - values[a]);
  if (!order.length) { host.append(make("p", {}, "There are no local models to compare with.")); return null; }
  const all = order.map(i => values[i]), middle = median(all), spans = !!lows;
  const halves = spans ? order.map(i => ((highs[i] ?? 0) - (lows[i] ?? 0)) / 2) : [0];
  const reach = FAR * Math.max(median(all.map(g => Math.abs(g - middle))), median(halves) / 2, .1);
  const near = order.filter(i => Math.abs(values[i] - middle) <= reach);
  const ends = near.flatMap(i => [values[i], lows?.[i] ?? values[i], highs?.[i] ?? values[i]]);
  const band = run.margin ?? 0, least = band || 1;
  const bottom = Math.min(Math.max(ends.reduce((a, b) => Math.min(a, b)), middle - reach), -1.3 * least);
  const top = Math.max(Math.min(ends.reduce((a, b) => Math.max(a, b)), middle + reach), 1.3 * least);
  const low = bottom - .05 * (top - bottom), high = top + .05 * (top - bottom);
  const outside = all.filter(g => g < low || g > high).length;
  const more = all.filter(g => g > band).length, less = all.filter(g => g < -band).length;
  const frame = { x: [-.5, order.length - .5], y: [low, high], xticks: false };
  const size = clamp(300 / order.length, 1.6, 6), what = run.recommends ? "recommended" : run.personal;
  return figure(run, host, {
    name: "improvements", title: "Improvement over local models", upright: true,
    height: w => w < 500 ? 300 : 340,
    describe: () => `How much lower each client's ${run.recommends ? "expected" : "test"} ${run.metric} is with its ${what} model than with its local model, in percent, the largest first` +
      `${spans ? `, with ${number(run.level)}% intervals` : ""}. ` +
      (band ? `${number(more)} of ${number(order.length)} clients improve by more than the margin (${number(band)}%), ${number(less)} are worse by more than that. The band shows the margin.` : `${number(more)} of ${number(order.length)} clients have a lower loss.`) +
      `${outside ? ` Beyond the edge, drawn open on it: ${number(outside)}.` : ""}`,
    say: i => i === null ? "" : `${c.client[i]}: ${side(run, "local", i)}, ${run.kinds[i]}`,
    data: () => run.table(["client", key, key + "_ci_low", key + "_ci_high", "recommended", "lowest", "confidence"], order),
    draw(pen, w, h) {
      const a = axes(pen, w, h, { ...frame, xlabel: `${number(order.length)} clients, largest improvement first`, ylabel: "% lower than local" });
      const at = g => a.y(clamp(g, low, high));
      if (band) pen.poly([[a.left, a.y(band)], [a.right, a.y(band)], [a.right, a.y(-band)], [a.left, a.y(-band)]], { fill: color("soft"), alpha: .18, closed: true });
      pen.poly([[a.left, a.y(0)], [a.right, a.y(0)]], { stroke: color("ink") });
      const width = clamp(300 / order.length, .4, 2);
      if (spans) order.forEach((i, k) => {
        if (known(lows[i])) pen.poly([[a.x(k), at(lows[i])], [a.x(k), at(highs[i])]],
          { stroke: colorOf(run.kinds[i]), width, alpha: (order.length > MANY ? .25 : .55) });
      });
      const room = (a.right - a.left) / order.length;  // names are shown whole or not at all
      if (order.every(i => 6.1 * String(c.client[i]).length < room - 6)) order.forEach((i, k) => pen.text(a.x(k), a.bottom + 13, String(c.client[i]), { anchor: "middle", fill: color("soft"), size: 11 }));
      return order.map((i, k) => {
        mark(pen, run.kinds[i], a.x(k), at(values[i]), size, .4 + .6 * run.certain(i), values[i] < low || values[i] > high);
        return { i, x: a.x(k), y: at(values[i]) };
      });
    },
    over(pen, marks) {
      const p = marks.find(one => one.i === run.picked);
      if (p) pen.circle(p.x, p.y, size + 5, { stroke: color("ink"), width: 2.5 });
    },
  });
}

function curves(pen, a, lines) {
  lines.forEach((line, k) => {
    const shade = color(line.color ?? SERIES[k % SERIES.length]), points = line.points.map(([x, y]) => [a.x(x), a.y(y)]);
    pen.poly(points, { stroke: shade, width: line.width ?? 2, dash: line.dash ?? DASHES[k % DASHES.length] });
    if (line.dots) for (const [x, y] of points) pen.circle(x, y, 3, { fill: shade });
  });
}
// Above the axes where these leave room for it, as on phones; else where few points of the lines lie.
const KEY_ROW = 17;
const keyRoom = (w, entries) => w < 500 ? 12 + KEY_ROW * entries : 12;
function key(pen, a, entries) {
  const width = Math.max(...entries.map(e => e.label.length)) * 6.6 + 34, height = KEY_ROW * entries.length + 4;
  const dots = entries.flatMap(e => (e.points ?? []).flatMap(([x, y], k, all) => {
    const [u, v] = all[Math.min(k + 1, all.length - 1)], many = Math.ceil(60 / all.length);
    return Array.from({ length: many }, (_, j) => j / many).map(s => [(1 - s) * a.x(x) + s * a.x(u), (1 - s) * a.y(y) + s * a.y(v)]);
  }));
  const steps = [0, .25, .5, .75, 1], places = steps.flatMap(s => steps.map(t => [a.right - width - t * (a.right - a.left - width - 4), a.top + 4 + s * (a.bottom - a.top - height - 8)]));
  const hidden = ([x, y]) => dots.filter(([u, v]) => u > x - 4 && u < x + width + 4 && v > y - 4 && v < y + height + 4).length;
  const [left, top] = a.top >= height ? [a.left, 2] : places.reduce((best, one) => hidden(one) < hidden(best) ? one : best);
  pen.poly([[left, top], [left + width, top], [left + width, top + height], [left, top + height]], { fill: color("panel"), alpha: .85, closed: true });
  entries.forEach((e, k) => {
    const y = top + 10 + KEY_ROW * k;
    pen.poly([[left + 4, y], [left + 28, y]], { stroke: color(e.color), width: 2, dash: e.dash });
    pen.text(left + 32, y, e.label, { fill: color("ink"), size: 11 });
  });
}
const nearestTo = (values, x) => values.reduce((best, v, k) => Math.abs(v - x) < Math.abs(values[best] - x) ? k : best, 0);
function logSpanOf(values, room = .06) {
  const low = Math.log(Math.min(...values)), high = Math.log(Math.max(...values)), more = (high - low || 1) * room;
  return [Math.exp(low - more), Math.exp(high + more)];
}
function spanOf(values, room = .08) {
  const low = Math.min(...values), high = Math.max(...values), more = (high - low || Math.abs(high) || 1) * room;
  return [low - more, high + more];
}

function pathFigure(run, host) {
  const path = run.path, plan = path.plan, mine = () => path.clients?.[run.picked];
  const lams = path.lam, best = path.loss.indexOf(Math.min(...path.loss));
  return figure(run, host, {
    name: "path", title: "Held-out loss by lambda", marks: false, lively: true,
    height: w => w < 500 ? 390 : 340,
    describe: () => `Held-out ${run.metric} of all clients (${number(path.rows)} rows) against lambda, the strength of the pull towards the global model: small is close to local models (${number(path.local)}), large close to the global model (${number(path.global)}). ` +
      `The best single lambda is ${number(lams[best], 3)} with ${number(path.loss[best])}. The plan, ${plan.about}, has ${number(plan.loss)}; personal models average several settings.` +
      (path.clients ? " The selected client has a line of its own." : "") + (isWide(losses()) ? " The loss axis is logarithmic." : ""),
    data: () => [["lambda", "loss", ...(mine() ? [String(run.clients.client[run.picked])] : [])], lams.map((lam, k) => [lam, path.loss[k], ...(mine() ? [mine()[k]] : [])])],
    draw(pen, w, h) {
      const own = mine(), shown = losses(), logy = isWide(shown);
      const a = axes(pen, w, h, { x: [Math.min(...lams), Math.max(...lams)], y: logy ? logSpanOf(shown) : spanOf(shown), logx: true, logy, top: keyRoom(w, own ? 5 : 4),
        xlabel: "lambda: local to global", ylabel: `held-out ${run.metric}` });
      const across = y => [[Math.min(...lams), y], [Math.max(...lams), y]];
      const lines = [
        ...(known(path.local) ? [{ points: across(path.local), color: "local", dash: [7, 4], label: "local models" }] : []),
        ...(known(path.global) ? [{ points: across(path.global), color: "global", dash: [2, 3], label: "global model" }] : []),
        { points: lams.map((lam, k) => [lam, path.loss[k]]), color: "ink", dash: [], dots: true, label: "one lambda for all" },
      ];
      if (own) lines.push({ points: lams.map((lam, k) => [lam, own[k]]).filter(p => known(p[1]) && (!logy || p[1] > 0)), color: "accent", dash: [], label: String(run.clients.client[run.picked]).slice(0, 24) });
      curves(pen, a, lines);
      const low = clamp(plan.low ?? lams[0], Math.min(...lams), Math.max(...lams)), high = clamp(plan.high ?? lams.at(-1), Math.min(...lams), Math.max(...lams));
      pen.poly([[a.x(low), a.y(plan.loss)], [a.x(high), a.y(plan.loss)]], { stroke: color("personal"), width: 4 });
      if (known(plan.middle)) mark(pen, "personal", a.x(clamp(plan.middle, low, high)), a.y(plan.loss), 7, 1);
      key(pen, a, [...lines, { label: "the plan", color: "personal", dash: [], points: [[low, plan.loss], [high, plan.loss]] }]);
    },
  });
  function losses() { return [...path.loss, path.local, path.global, plan.loss, ...(mine() || [])].filter(known); }
}

function rowsFigure(run, host) {
  const c = run.curve, rows = c.rows;
  const span = [rows[0], rows.at(-1)];
  const at = (values, n) => {  // between the points, along the logarithm of rows
    const k = clamp(rows.findIndex(r => r >= n), 1, rows.length - 1);
    const share = (Math.log(n) - Math.log(rows[k - 1])) / (Math.log(rows[k]) - Math.log(rows[k - 1]));
    return values[k - 1] + share * (values[k] - values[k - 1]);
  };
  const here = at(c.personal, c.now), most = Math.max(...c.local), least = Math.min(...c.personal);
  const shown = ["local", "personal", ...(c.global[0] < 2 * most - least ? ["global"] : [])];  // far away it would flatten the others
  return figure(run, host, {
    name: "rows", title: "Rows that a local model needs to do as well", upright: true, at: nearestTo(rows, c.now),
    height: w => w < 500 ? 300 : 340,
    describe: () => `Expected ${run.metric} of a typical client by its number of rows. With its ${number(Math.round(c.now))} rows today it is ${number(at(c.local, c.now))} with a local model and ` +
      `${number(here)} with a personal model; a local model would reach that with ${number(Math.round(c.match))} rows. ` +
      `With the global model it is ${number(c.global[0])}${shown.includes("global") ? "" : ", beyond the edge"}. Losses at today's rows are means over all clients' held-out rows; theory gives their course with more rows.`,
    say: k => `${number(Math.round(rows[k]))} rows: local ${number(c.local[k])}, personal ${number(c.personal[k])}, global ${number(c.global[k])}`,
    data: () => [["rows", "local", "personal", "global"], rows.map((n, k) => [n, c.local[k], c.personal[k], c.global[k]])],
    draw(pen, w, h) {
      const a = axes(pen, w, h, { x: span, y: spanOf(shown.flatMap(name => c[name])), logx: true, xticks: false, xlabel: "rows of the client", ylabel: `expected ${run.metric}` });
      const lines = shown.map((name, k) => ({ points: rows.map((n, j) => [n, c[name][j]]), color: name, dash: DASHES[[1, 0, 2][k]], label: name }));
      for (const [n, words] of [[c.now, `${number(Math.round(c.now))} now`], [c.match, `${number(Math.round(c.match))} to match`]]) {
        pen.poly([[a.x(n), a.top], [a.x(n), a.bottom]], { stroke: color("soft"), dash: [4, 4] });
        pen.text(clamp(a.x(n), a.left + 34, a.right - 44), a.bottom + 13, words, { anchor: "middle", fill: color("ink") });
      }
      curves(pen, a, lines);
      pen.poly([[a.x(c.now), a.y(here)], [a.x(c.match), a.y(here)]], { stroke: color("ink"), width: 1.5, dash: [2, 4] });
      mark(pen, "personal", a.x(c.now), a.y(here), 6, 1);
      mark(pen, "local", a.x(c.match), a.y(here), 6, 1);
      key(pen, a, lines);
      return rows.map((n, i) => ({ i, x: a.x(n), y: a.y(c.local[i]) }));
    },
    over(pen, marks, k) {
      const p = marks[k];
      if (p) pen.circle(p.x, p.y, 8, { stroke: color("ink"), width: 2 });
    },
  });
}

function effectFigure(run, host, effect) {
  const v = effect.values;
  return figure(run, host, {
    name: `effect-${effect.column}`, title: `Partial dependence on ${effect.column}`, upright: true, at: 0,
    height: w => w < 500 ? 240 : 260,
    describe: () => `Mean prediction of the global model if all rows had the same ${effect.column}, and the straight line through it.`,
    say: k => `${effect.column} ${number(v[k])}: prediction ${number(effect.prediction[k])}, straight line ${number(effect.linear[k])}`,
    data: () => [[effect.column, "prediction", "linear"], v.map((x, k) => [x, effect.prediction[k], effect.linear[k]])],
    draw(pen, w, h) {
      const a = axes(pen, w, h, { x: [v[0], v.at(-1)], y: spanOf([...effect.prediction, ...effect.linear]), xlabel: effect.column, ylabel: "prediction" });
      const lines = [["prediction", "personal", []], ["linear", "soft", DASHES[1]]].map(([name, shade, dash]) => ({ points: v.map((x, k) => [x, effect[name][k]]), color: shade, dash, label: name === "linear" ? "straight line" : name }));
      curves(pen, a, lines);
      key(pen, a, lines);
      return v.map((x, i) => ({ i, x: a.x(x), y: a.y(effect.prediction[i]) }));
    },
    over(pen, marks, k) {
      const p = marks[k];
      if (p) pen.circle(p.x, p.y, 8, { stroke: color("ink"), width: 2 });
    },
  });
}

function roundsFigure(run, host) {
  const parts = ["test", "validation", "train"].filter(p => run.rounds.some(r => r.table[p])), one = run.rounds.length === 1;
  const options = names => names.map(([value, label]) => make("option", { value }, label));
  const across = make("select", { "aria-label": "Horizontal axis", onchange: () => drawn.paint() },
    ...options([["round", "by round"], ["bytes", "by bytes sent"], ["gradients", "by gradients"], ["seconds", "by seconds"],
      ["epsilon", "by epsilon spent"]].filter(([value]) => run.rounds.some(r => value in r.table))));
  const part = make("select", { "aria-label": "Rows", onchange: () => drawn.paint() }, ...options(parts.map(p => [p, `${p} rows`])));
  host.append(make("div", { class: "tools" }, across, ...(one ? [] : [part])));
  const lines = () => {
    const x = across.value;
    const found = one ? parts.map(p => ({ label: p, table: run.rounds[0].table, y: p, kept: run.rounds[0].kept }))
      : run.rounds.map(r => ({ label: r.name, table: r.table, y: part.value, kept: r.kept }));
    return found.filter(f => f.table[f.y]).map((f, k) => ({ ...f, color: SERIES[k % SERIES.length], dash: DASHES[k % DASHES.length],
      points: f.table.round.map((t, j) => [f.table[x][j], f.table[f.y][j], t]).filter(p => known(p[0]) && known(p[1])) })).filter(f => f.points.length);
  };
  const drawn = figure(run, host, {
    name: "rounds", title: "Loss by round", marks: false, lively: true,
    height: w => w < 500 ? 300 : 340,
    describe: () => lines().map(f => `${f.label}: ${number(f.points[0][1])} at first, ${number(f.points.at(-1)[1])} at the end, round ${f.kept} is kept`).join("; ") + ". Rings mark the rounds that are kept." +
      (one && known(run.rounds[0].table.epsilon?.at(-1)) ? ` The epsilon spent grows to ${number(run.rounds[0].table.epsilon.at(-1), 3)}.` : ""),
    data: () => {
      const names = ["round", ...parts, "bytes", "gradients", "seconds", "epsilon"].filter(n => run.rounds.some(r => n in r.table));
      return [["method", ...names], run.rounds.flatMap(r => r.table.round.map((_, j) => [r.name, ...names.map(n => r.table[n]?.[j] ?? null)]))];
    },
    draw(pen, w, h) {
      const found = lines(), xs = found.flatMap(f => f.points.map(p => p[0])), ys = found.flatMap(f => f.points.map(p => p[1]));
      if (!xs.length) return;
      const x = [xs.reduce((a, b) => Math.min(a, b)), xs.reduce((a, b) => Math.max(a, b))];
      const a = axes(pen, w, h, { x: x[0] === x[1] ? [x[0], x[0] + 1] : x, y: spanOf(ys), xlabel: across.selectedOptions[0].textContent.replace("by ", ""), ylabel: `${one ? "" : part.value + " "}${run.metric}` });
      curves(pen, a, found.map(f => ({ ...f, dots: f.points.length < 3 })));
      for (const f of found) for (const p of f.points) if (p[2] === f.kept) pen.circle(a.x(p[0]), a.y(p[1]), 6, { stroke: color("ink"), width: 2 });
      key(pen, a, found);
    },
  });
  return drawn;
}

function spreadFigure(run, host) {
  const s = run.spread, rows = [...s.borders].sort((a, b) => a.R - b.R);
  const values = [s.R, s.low, s.high, ...rows.map(r => r.R)].filter(x => known(x) && x > 0);
  if (!known(s.R) || !values.length) { host.append(make("p", {}, "Heterogeneity could not be estimated.")); return null; }
  const low = Math.min(...values) / 1.6, high = Math.max(...values) * 1.6;
  return figure(run, host, {
    name: "heterogeneity", title: "Heterogeneity against the thresholds", marks: false,
    height: () => 70 + 34 * rows.length,
    describe: () => `Heterogeneity is R = ${number(s.R, 3)}${known(s.low) ? ` (95% CI: ${number(s.low, 3)} to ${number(s.high, 3)})` : ""}, the shaded line. ` +
      rows.map(r => `${r.name}: threshold ${number(r.R, 3)}${r.side ? `, favors ${r.side}` : ""}`).join("; ") + ".",
    data: () => [["what", "R", "low", "high", "favors", "source"], [["the clients", s.R, s.low, s.high, "", ""], ...rows.map(r => [r.name, r.R, null, null, r.side, r.source])]],
    draw(pen, w, h) {
      const left = 92, right = w - 70, top = 10, bottom = h - 44, ink = color("soft");
      const x = v => left + (right - left) * (Math.log(clamp(v, low, high)) - Math.log(low)) / (Math.log(high) - Math.log(low));
      if (known(s.low)) pen.poly([[x(s.low), top], [x(s.high), top], [x(s.high), bottom], [x(s.low), bottom]], { fill: color("accent"), alpha: .22, closed: true });
      pen.poly([[x(s.R), top], [x(s.R), bottom]], { stroke: color("accent"), width: 3 });
      rows.forEach((r, k) => {
        const y = top + 17 + 34 * k;
        pen.poly([[left, y], [right, y]], { stroke: color("line") });
        pen.text(left - 8, y, r.name, { anchor: "end", fill: color("ink") });
        mark(pen, r.side, x(r.R), y, 6, 1);
        pen.text(right + 6, y, r.side, { fill: color("ink") });
      });
      for (const tick of logTicks(low, high)) pen.text(clamp(x(tick), left + 10, right - 10), bottom + 13, number(tick, 2), { anchor: "middle", fill: ink });
      pen.text((left + right) / 2, h - 10, "R: heterogeneity", { anchor: "middle", fill: ink });
    },
  });
}

function card(run, host) {
  const c = run.clients, body = make("div"), list = make("datalist", { id: `names-${run.index}` });
  const find = text => {
    const want = text.toLowerCase(), out = [];
    for (const i of run.all) if (run.names[i].includes(want)) { out.push(i); if (out.length === 30) break; }
    return out;
  };
  const search = make("input", {
    type: "search", list: list.id, placeholder: "Find a client", "aria-label": "Find a client",
    oninput: () => {
      const found = find(search.value);
      list.replaceChildren(...found.map(i => make("option", { value: c.client[i] })));
      const exact = run.all.find(i => String(c.client[i]) === search.value);
      if (exact !== undefined) run.pick(exact);
    },
    onchange: () => { const found = find(search.value); if (search.value && found.length && !run.names.includes(search.value.toLowerCase())) run.pick(found[0]); },
  });
  const move = step => () => { const at = run.order.indexOf(run.picked); run.pick(run.order[(at + step + run.count) % run.count]); };
  host.append(make("div", { class: "tools" }, search, list,
    make("button", { type: "button", onclick: move(-1), "aria-label": "Previous client by improvement" }, "‹"),
    make("button", { type: "button", onclick: move(1), "aria-label": "Next client by improvement" }, "›")), body);

  const kind = i => c.recommended?.[i] ?? "personal";
  function why(i) {
    const out = [], mine = run.recommends ? `the recommended (${kind(i)}) model` : run.personal === "personal" ? "the personal model" : run.personal, loss = c[kind(i)]?.[i];
    for (const other of ["local", "global"]) {
      if (!known(c[OVER(other)]?.[i]) || c.recommended?.[i] === other || side(run, other, i) === "no difference") continue;
      const low = c[OVER(other) + "_ci_low"]?.[i], high = c[OVER(other) + "_ci_high"]?.[i];
      out.push(`${run.recommends ? "Expected" : "Test"} ${run.metric} with ${mine} (${number(loss)}) is ${direction(c[OVER(other)][i])} than with ${other === "local" ? "its local" : "the global"} model (${number(c[other][i])})` +
        (known(low) ? `; ${number(run.level)}% interval: ${direction(low)} to ${direction(high)}.` : "."));
    }
    if (known(c.rows_to_match?.[i]) && kind(i) !== "local") out.push(`A local model would need about ${number(Math.ceil(c.rows_to_match[i]))} rows to match its personal model; the client has ${number(c.rows[i])}.`);
    if (known(c.distance?.[i]) && run.count > 2 && c.distance[i] > 0) {
      const nearer = c.distance.filter(d => known(d) && d < c.distance[i]).length;
      out.push(`Its model is farther from the global one than those of ${number(nearer)} of ${number(run.count - 1)} other clients.`);
    }
    if (c.is_outlier?.[i] === true) out.push("It is an outlier: its coefficients are far from the other clients'.");
    return out;
  }
  function losses(i) {
    const measured = run.recommends, found = run.purpose === "compare" ? run.columns.map(col => col.key).filter(k => run.methods.includes(k)) : MODELS.filter(n => known(c[n]?.[i]));
    const most = Math.max(...found.map(n => c[n][i]).filter(known));
    const heads = measured ? ["model", "expected", "measured"] : ["model", "test loss"];
    const where = measured ? `${run.metric} of its models; measured on its ${number(c.held_out_rows?.[i])} held-out rows` : `${run.metric} of its models on its ${number(c.test?.[i])} test rows`;
    return make("table", { class: "plain bars" }, make("caption", {}, where),
      make("thead", {}, make("tr", {}, ...heads.map((h, k) => make("th", { scope: "col", class: k ? "number" : false }, h)), make("td"))),
      make("tbody", {}, ...found.map(n => {
        const bar = make("i");
        bar.style.width = `${clamp(100 * c[n][i] / most, 0, 100) || 0}%`;
        if (KINDS.includes(n)) bar.style.background = `var(--${n})`;
        return make("tr", {}, make("th", { scope: "row" }, n + (c.recommended?.[i] === n ? " (recommended)" : "")), make("td", { class: "number" }, number(c[n][i])),
          ...(measured ? [make("td", { class: "number" }, number(c[`${n}_held_out`]?.[i]))] : []), make("td", { class: "bar" }, bar));
      })));
  }
  function coefficients(i) {
    const k = run.coefficients;
    if (!k) return "";
    const rows = k.names.map((n, j) => [n, k.personal[i][j], k.global[j], k.personal[i][j] - k.global[j]]).sort((a, b) => Math.abs(b[3]) - Math.abs(a[3]));
    return make("details", {}, make("summary", {}, run.recommends ? "Coefficients of its recommended model" : "Coefficients of its personal model"), make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Its coefficients" },
      make("table", { class: "plain" }, make("thead", {}, make("tr", {}, ...["coefficient", "its model", "global model", "difference"].map(h => make("th", { scope: "col" }, h)))),
        make("tbody", {}, ...rows.map(([n, ...values]) => make("tr", {}, make("th", { scope: "row" }, n), ...values.map(v => make("td", { class: "number" }, number(v, 3)))))))));
  }
  return {
    show() {
      const i = run.picked;
      if (i === null) return;
      const facts = [run.recommends ? ["recommended", `${c.recommended[i]} model`] : ["lowest test loss", c.lowest?.[i] || "no test rows"]];
      if (c.confidence) facts.push(["confidence", c.confidence[i]]);
      for (const other of ["local", "global"]) if (known(c[`probability_better_than_${other}`]?.[i]) && side(run, other, i) !== "same model" && side(run, other, i) !== "no difference")
        facts.push([`P(better than ${other})`, probability(c[`probability_better_than_${other}`][i])]);
      facts.push(["rows", number(c.rows[i]) + (c.train ? ` (${number(c.train[i])} train, ${number(c.validation[i])} validation, ${number(c.test[i])} test)` : "")]);
      if (known(c.lam?.[i]) && kind(i) === "personal") facts.push(["lambda", number(c.lam[i], 3)]);
      if (known(c.alpha?.[i]) && kind(i) === "personal") facts.push(["alpha", number(c.alpha[i], 3)]);
      body.replaceChildren(make("h4", {}, String(c.client[i])),
        make("dl", {}, ...facts.flatMap(([term, fact]) => [make("dt", { title: run.terms[term] || false }, term), make("dd", {}, fact)])), losses(i),
        make("ul", {}, ...why(i).map(sentence => make("li", {}, sentence))), coefficients(i));
    },
  };
}

function clientsTable(run, host) {
  const c = run.clients, columns = () => every.checked ? run.columns : run.columns.filter(col => FIRST.includes(col.key) || run.methods.includes(col.key));
  const keys = {};  // a column's values for sorting: numbers within text in their order
  let by = null, down = false, page = 0, rows = run.all;
  const every = make("input", { type: "checkbox", onchange: draw, id: `every-${run.index}` });
  const text = make("input", { type: "search", placeholder: "Filter", "aria-label": "Filter the clients", oninput: refilter });
  const kind = make("select", { "aria-label": run.recommends ? "Recommended model" : "Model with the lowest test loss", onchange: refilter }, make("option", { value: "" }, "all"),
    ...KINDS.filter(k => run.kinds.includes(k)).map(k => make("option", { value: k }, k)));
  const count = make("span", { role: "status" }), head = make("thead"), body = make("tbody");
  const back = make("button", { type: "button", onclick: () => { page -= 1; draw(); } }, "Previous");
  const on = make("button", { type: "button", onclick: () => { page += 1; draw(); } }, "Next");
  const words = run.columns.filter(col => col.key !== "client" && c[col.key].some(x => typeof x === "string")).map(col => col.key);
  host.append(make("div", { class: "tools" }, text, kind, make("label", { for: every.id }, every, " all columns"),
    make("button", { type: "button", onclick: () => save(fileName(run, "clients", "csv"), csv(...run.table(run.columns.map(col => col.key), rows)), "text/csv") }, "Download CSV")),
    make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Clients" }, make("table", { class: "clients" }, head, body)),
    make("div", { class: "tools" }, back, on, count));
  const isText = key => key === OVER("local") || key === OVER("global");
  const cue = make("p", { class: "cue" }, "Scroll the table sideways for more columns.");
  const pane = host.querySelector(".scroll");
  pane.after(cue);
  if (!run.recommends && c[OVER("local")]) cue.after(make("p", { class: "cue" }, `vs. local: test ${run.metric} with ${run.personal === "personal" ? "the personal model" : run.personal} against the local model.`));
  if (run.recommends) cue.after(make("p", { class: "cue" }, `vs.: expected ${run.metric} with the recommended model against the other, from the expected losses in this table; in brackets the ${number(run.level)}% interval of the improvement in % (negative: higher loss).`));
  new ResizeObserver(() => { cue.hidden = pane.scrollWidth <= pane.clientWidth + 1; }).observe(pane);
  function shownCell(key, i) {
    for (const other of ["local", "global"]) if (key === OVER(other)) return side(run, other, i);
    if (key.includes("_pct")) return known(c[key][i]) ? end(c[key][i]) : "-";
    return key.startsWith("probability") ? probability(c[key][i]) : number(c[key][i]);
  }
  function refilter() {
    const want = text.value.toLowerCase();
    rows = run.all.filter(i => (!kind.value || run.kinds[i] === kind.value) &&
      (!want || run.names[i].includes(want) || words.some(key => String(c[key][i]).toLowerCase().includes(want))));
    resort();
  }
  function resort() {
    if (by !== null) {
      const values = keys[by] ??= c[by].map(x => typeof x === "string" ? x.toLowerCase().replace(/\d+/g, d => d.padStart(12, "0")) : x);
      const side = down ? -1 : 1;
      rows = [...rows].sort((a, b) => {
        const x = values[a], y = values[b];
        if (x === null || y === null) return x === y ? a - b : x === null ? 1 : -1;  // what is missing comes last
        return (x < y ? -side : x > y ? side : 0) || a - b;
      });
    }
    page = 0;
    draw();
  }
  function sortBy(name) {
    down = by === name ? !down : typeof c[name].find(x => x !== null) === "number";
    by = name;
    resort();
    head.querySelector(`button[data-key="${CSS.escape(name)}"]`)?.focus();
  }
  function draw() {
    const shown = columns(), pages = Math.max(1, Math.ceil(rows.length / PAGE));
    page = clamp(page, 0, pages - 1);
    head.replaceChildren(make("tr", {}, ...shown.map(col => make("th", {
      scope: "col", class: typeof c[col.key].find(x => x !== null) === "number" && !isText(col.key) ? "number" : false,
      "aria-sort": col.key === by ? (down ? "descending" : "ascending") : false,
    }, make("button", { type: "button", "data-key": col.key, title: col.about || false, onclick: () => sortBy(col.key) }, col.label + (col.key === by ? (down ? " ↓" : " ↑") : ""))))));
    body.replaceChildren(...rows.slice(page * PAGE, (page + 1) * PAGE).map(i => make("tr", { class: i === run.picked ? "picked" : false },
      ...shown.map(col => col.key === "client"
        ? make("td", {}, make("button", { type: "button", class: "name", onclick: () => { run.pick(i); run.toCard(); } }, String(c.client[i])))
        : make("td", { class: typeof c[col.key][i] === "number" && !isText(col.key) ? "number" : false }, shownCell(col.key, i))))));
    cue.hidden = pane.scrollWidth <= pane.clientWidth + 1;
    count.textContent = `${number(rows.length)} of ${number(run.count)} clients, page ${page + 1} of ${pages}`;
    back.disabled = page === 0;
    on.disabled = page >= pages - 1;
  }
  draw();
  return { show: draw };
}

async function copy(code, button) {
  try { await navigator.clipboard.writeText(code.textContent); }
  catch {  // where a page may not use the clipboard: the command is selected, and copied the old way
    const range = document.createRange();
    range.selectNodeContents(code);
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    document.execCommand("copy");
  }
  button.textContent = "Copied";
  setTimeout(() => { button.textContent = "Copy"; }, 2000);
}

RUNS.forEach((run, index) => {
  const article = document.querySelector(`article[data-run="${index}"]`), part = name => article.querySelector(`[data-part="${name}"]`);
  const c = run.clients;
  run.index = index;
  run.count = c.client.length;
  run.all = c.client.map((_, i) => i);
  run.names = c.client.map(name => String(name).toLowerCase());
  run.methods = run.rounds.map(r => r.name).filter(name => name in c);
  run.kinds = c.kind ?? c.recommended ?? c.lowest ?? c.client.map(() => "");
  run.certain = i => c.certainty?.[i] ?? 1;
  const over = c[OVER("local")];
  run.order = [...run.all].sort((a, b) => (over?.[b] ?? -Infinity) - (over?.[a] ?? -Infinity) || a - b);
  run.picked = run.count ? run.order[0] : null;
  run.table = (keys, rows) => {
    const had = keys.filter(key => key in c), labels = Object.fromEntries(run.columns.map(col => [col.key, col.key]));
    return [had.map(key => labels[key] ?? key), rows.map(i => had.map(key => c[key][i]))];
  };
  const parts = [];
  run.pick = i => {
    run.picked = i;
    for (const one of parts) one.repaint ? one.repaint() : one.show();
    document.getElementById("tip").textContent = `${c.client[i]} selected`;
  };
  run.toCard = () => part("card").scrollIntoView({ block: "nearest" });
  const add = one => { if (one) parts.push(one); };
  add(mooring(run, part("mooring")));
  add(card(run, part("card")));
  add(improvementsFigure(run, part("improvements")));
  if (run.path) { const path = pathFigure(run, part("path")); if (run.path.clients) add({ repaint: path.paint }); }
  if (run.curve) rowsFigure(run, part("rows"));
  for (const effect of run.effects ?? []) {
    const box = make("div", {}, make("h4", {}, effect.column));
    part("effects").append(box);
    effectFigure(run, box, effect);
  }
  if (run.rounds.length) roundsFigure(run, part("rounds"));
  const theory = part("theory");
  if (run.spread && theory) theory.addEventListener("toggle", () => spreadFigure(run, part("spread")), { once: true });
  add(clientsTable(run, part("table")));
  for (const box of article.querySelectorAll(".command")) box.append(make("button", { type: "button", onclick: event => copy(box.querySelector("code"), event.target) }, "Copy"));
  for (const one of parts) one.show?.();
});

const theme = document.getElementById("theme"), system = matchMedia("(prefers-color-scheme: dark)");
const dark = () => (document.documentElement.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
function label() { theme.textContent = dark() ? "Light" : "Dark"; }
function repaint() {
  for (const name of Object.keys(shades)) delete shades[name];
  label();
  figures.forEach((paint, k) => setTimeout(paint, k));  // one at a time: the page stays responsive with many clients
}
theme.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; repaint(); });
system.addEventListener("change", repaint);
label();
})();
