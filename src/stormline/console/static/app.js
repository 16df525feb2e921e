// The console's page: asks the console every two seconds and draws what it says. Text only ever enters as text.

const POLL_MS = 2000;
const FETCH_TIMEOUT_MS = 9000; // longer than the console waits for the APM
const STAGES = ["queued", "plan", "resolve", "connect", "tls", "send", "first_byte", "body", "decode", "parse", "callback"];
const WINDOW_WORDS = { 300: "5 minutes", 3600: "hour", 86400: "24 hours" };

const $ = (id) => document.getElementById(id);
const asked = new URLSearchParams(location.search);
const view = {
  windowS: Object.hasOwn(WINDOW_WORDS, asked.get("window_s")) ? Number(asked.get("window_s")) : 300,
  host: asked.get("host"),
  lastGood: null, awaySince: null, round: 0,
};

/** Keep what is shown in the address, so that a reload or a bookmark shows it again. */
function remember() {
  const query = new URLSearchParams({ window_s: view.windowS, ...(view.host === null ? {} : { host: view.host }) });
  history.replaceState(null, "", `/?${query}`);
}

function element(tag, { cls, text, title } = {}, ...children) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  if (title) node.title = title;
  node.append(...children);
  return node;
}

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

// -- words ---------------------------------------------------------------------------------------------------------

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const tenth = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });

function percent(value) {
  if (value === null || value === undefined) return "–";
  // Never round a failure away: 99.996 is not 100.
  const digits = value >= 99.95 && value < 100 ? 3 : value >= 99 && value < 100 ? 2 : 1;
  const cut = Math.floor(value * 10 ** digits) / 10 ** digits;
  return `${value === 100 ? "100" : cut.toFixed(digits)} %`;
}

function duration(ms) {
  if (ms === null || ms === undefined) return "–";
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${whole.format(ms)} ms` : `${(ms / 1000).toFixed(ms < 10000 ? 2 : 1)} s`;
}

const grade = (value) => (value === null ? "" : value >= 99 ? "good" : value >= 95 ? "fair" : "poor");
const clockTime = (ms) => new Date(ms).toLocaleTimeString([], { hourCycle: "h23" });

// -- drawing -------------------------------------------------------------------------------------------------------

function rates(line) {
  return line.calls.map((calls, at) => (calls ? (100 * line.successes[at]) / calls : null));
}

function scaleFloor(values) {
  const lowest = Math.min(100, ...values.filter((value) => value !== null));
  return [99, 95, 90, 75, 50, 0].find((floor) => lowest >= floor + (100 - floor) * 0.1 || floor === 0);
}

/** Success as a line (gaps where nothing was called), calls as quiet bars behind. Gives the scale's floor. */
function drawLine(target, line, width, height) {
  const values = rates(line);
  const floor = scaleFloor(values);
  const step = width / values.length;
  const top = 3;
  const y = (value) => top + ((100 - value) / (100 - floor)) * (height - 2 * top);
  const most = Math.max(1, ...line.calls);
  target.setAttribute("viewBox", `0 0 ${width} ${height}`);
  target.setAttribute("preserveAspectRatio", "none");
  const parts = [];
  line.calls.forEach((calls, at) => {
    if (!calls) return;
    const tall = Math.max(1, (calls / most) * height * 0.6);
    parts.push(svg("rect", { class: "volume", x: at * step + step * 0.1, y: height - tall, width: step * 0.8, height: tall }));
  });
  parts.push(svg("line", { class: "limit", x1: 0, x2: width, y1: y(100), y2: y(100) }));
  let path = "";
  let open = false;
  values.forEach((value, at) => {
    if (value === null) { open = false; return; }
    const x = (at + 0.5) * step;
    path += `${open ? "L" : "M"}${x.toFixed(2)} ${y(value).toFixed(2)}`;
    if (!open) path += `h0.01`; // a lone point shows as a dot
    open = true;
  });
  const calls = line.calls.reduce((sum, count) => sum + count, 0);
  const successes = line.successes.reduce((sum, count) => sum + count, 0);
  parts.push(svg("path", { class: `line ${grade(calls ? (100 * successes) / calls : null)}`, d: path || "M0 0" }));
  target.replaceChildren(...parts);
  return floor;
}

function rateBar(pct) {
  const bar = element("span", { cls: "bar" });
  if (pct !== null) {
    const ok = element("i", { cls: "ok" });
    ok.style.flexGrow = pct;
    bar.append(ok);
    if (pct < 100) {
      const bad = element("i", { cls: "bad" });
      bad.style.flexGrow = 100 - pct;
      bar.append(bad);
    }
  }
  return bar;
}

function drawTotals(top, series) {
  const { total } = top;
  $("success").textContent = percent(total.success_pct);
  $("success").className = `value ${grade(total.success_pct)}`;
  $("success-note").textContent = `of ${whole.format(total.calls)} calls in the last ${WINDOW_WORDS[top.window_s]}`;
  $("calls").textContent = whole.format(total.calls);
  $("calls-note").textContent = `${tenth.format((total.calls * 60) / top.window_s)} a minute`;
  for (const [id, value] of [["network", total.network_pct], ["http", total.http_pct]]) {
    $(id).textContent = percent(value);
    $(id).className = `value ${grade(value)}`;
  }
  for (const name of ["p50", "p95", "p99"]) $(name).textContent = duration(total[`${name}_ms`]);
  const kinds = Object.entries(total.failures);
  const shown = kinds.slice(0, kinds.length > 3 ? 2 : 3);
  const rest = kinds.slice(shown.length);
  if (rest.length) shown.push([`${rest.length} other kinds`, rest.reduce((sum, [, count]) => sum + count, 0)]);
  $("kinds").replaceChildren(
    ...(shown.length
      ? shown.map(([kind, count]) =>
          element("li", { title: kind }, element("span", { text: kind }), element("b", { text: whole.format(count) })))
      : [element("li", { cls: "note", text: "none" })]),
  );
  const floor = drawLine($("hero-line"), series.total, 900, 96);
  $("axis-from").textContent = clockTime(series.start_s * 1000);
  $("axis-scale").textContent = `line: success, ${floor} to 100 %  ·  bars: calls in ${stepWords(series.step_s)}`;
}

const stepWords = (seconds) => (seconds < 60 ? `${seconds} s` : `${seconds / 60} min`);

function hostRow(entry, series) {
  const open = element("button", { text: entry.host, title: "Show its latest calls" });
  open.type = "button";
  open.addEventListener("click", () => openDetail(entry.host));
  const trend = element("td", { cls: "trend" });
  const line = series.hosts[entry.host];
  if (line) {
    const image = svg("svg", { role: "img", "aria-label": `Success of ${entry.host} over time` });
    drawLine(image, line, 150, 26);
    trend.append(image);
  }
  const chips = element("div", { cls: "chips" });
  const failures = Object.entries(entry.failures);
  for (const [kind, count] of failures.slice(0, 3)) {
    chips.append(element("span", { cls: "chip" }, `${kind.slice(0, 28)} `, element("b", { text: whole.format(count) })));
  }
  if (failures.length > 3) {
    const rest = failures.slice(3).map(([kind, count]) => `${kind} ${count}`).join(", ");
    chips.append(element("span", { cls: "chip", text: `+${failures.length - 3}`, title: rest }));
  }
  const row = element(
    "tr", {},
    element("td", { cls: "host" }, open),
    element("td", { cls: "num", text: whole.format(entry.calls) }),
    element("td", { cls: "rate" },
      element("span", { cls: "rate-line" },
        element("b", { cls: grade(entry.success_pct), text: percent(entry.success_pct) }), rateBar(entry.success_pct))),
    trend,
    ...["p50_ms", "p95_ms", "p99_ms"].map((name) => element("td", { cls: "num", text: duration(entry[name]) })),
    element("td", {}, chips),
  );
  row.dataset.host = entry.host;
  row.setAttribute("aria-selected", String(entry.host === view.host));
  return row;
}

function drawHosts(top, series) {
  const focused = document.activeElement?.closest("#hosts tr")?.dataset.host;
  $("hosts").replaceChildren(...top.hosts.map((entry) => hostRow(entry, series)));
  $("hosts-title").textContent = top.hosts.length === 1 ? "1 host" : `${top.hosts.length} hosts, busiest first`;
  if (focused !== undefined) {
    [...$("hosts").children].find((row) => row.dataset.host === focused)?.querySelector("button").focus();
  }
}

// -- one host's latest calls ---------------------------------------------------------------------------------------

function outcome(call) {
  if (call.ok) return element("span", { cls: "good", text: `✓ ${call.status || "ok"}` });
  const where = call.phase && call.kind === call.failure ? ` in ${call.phase}` : "";
  return element("span", { cls: "poor", text: `✗ ${call.kind}${where}`, title: call.kind });
}

function callLine(call, longest) {
  const stages = element("span", { cls: "stages" });
  const words = [];
  for (const stage of STAGES) {
    const ms = call.stages_ms[stage];
    if (!ms) continue;
    words.push(`${stage.replace("_", " ")} ${duration(ms)}`);
    const part = element("i", { cls: `s-${stage}` });
    part.style.flexGrow = ms;
    stages.append(part);
  }
  stages.style.width = `${Math.max(0.5, (100 * call.total_ms) / longest)}%`;
  stages.title = words.join(", ");
  const tries = call.attempts.length > 1 ? `, ${call.attempts.length} attempts` : "";
  return element(
    "li", {},
    element("span", { cls: "time", text: clockTime(call.received_at_ms), title: call.clock_off ? "this device's clock is wrong" : "" }),
    element("span", { cls: "what", text: `${call.method} ${call.path}`, title: call.path }),
    outcome(call),
    element("span", { cls: "via", text: `${call.means || "–"} · ${call.network}${tries}` }),
    stages,
    element("span", { cls: "took", text: duration(call.total_ms) }),
  );
}

async function drawDetail() {
  const host = view.host;
  $("detail").hidden = host === null;
  if (host === null) return;
  $("detail-host").textContent = host;
  const answer = await ask(`/api/calls?${new URLSearchParams({ window_s: view.windowS, host })}`);
  if (host !== view.host) return;
  const calls = answer.state === "up" ? answer.latest.calls : null;
  $("detail-note").hidden = Boolean(calls?.length);
  $("detail-note").textContent = calls ? "No calls in this window." : "The latest calls cannot be read just now.";
  if (!calls) return;
  const longest = Math.max(1, ...calls.map((call) => call.total_ms));
  $("detail-calls").replaceChildren(...calls.map((call) => callLine(call, longest)));
}

function openDetail(host) {
  view.host = host === view.host ? null : host;
  remember();
  for (const row of $("hosts").children) row.setAttribute("aria-selected", String(row.dataset.host === view.host));
  $("detail-calls").replaceChildren();
  drawDetail();
}

// -- asking --------------------------------------------------------------------------------------------------------

/** Gives the console's answer, or one with the state `offline` or `locked`; never throws. */
async function ask(url) {
  try {
    const response = await fetch(url, { signal: AbortSignal.timeout(FETCH_TIMEOUT_MS) });
    if (response.status === 401) return { state: "locked" };
    if (!response.ok) return { state: "offline" };
    return await response.json();
  } catch {
    return { state: "offline" };
  }
}

function show(state, pill, title = "", text = "") {
  document.body.dataset.state = state;
  document.body.toggleAttribute("data-stale", Boolean(title));
  $("pill-text").textContent = pill;
  const hasData = view.lastGood !== null && view.lastGood.calls > 0;
  $("banner").hidden = !(title && hasData);
  $("banner-title").textContent = title;
  $("banner-text").textContent = hasData ? `${text} Below is the answer of ${clockTime(view.lastGood.at)}.` : text;
  $("data").hidden = !hasData;
  $("nothing").hidden = hasData;
  $("nothing-hint").hidden = Boolean(title);
  $("nothing-title").textContent = title || `No calls in the last ${WINDOW_WORDS[view.windowS]}`;
  $("nothing-text").textContent = title ? text : "The APM is well and listens; no device has reported yet in this window.";
}

function showTrouble(answer) {
  view.awaySince ??= Date.now();
  const since = `since ${clockTime(view.awaySince)}`;
  if (answer.state === "away") {
    show("away", `APM away ${since}`, "The APM does not answer.", `The console asks it every few seconds: ${answer.reason}. Numbers come back by themselves.`);
  } else if (answer.state === "locked") {
    show("locked", "signed out", "This console was restarted.", "Open it again with the new link that was printed.");
  } else {
    show("offline", `console away ${since}`, "The console does not answer.", "The page keeps asking.");
  }
}

async function refresh() {
  const round = ++view.round;
  const answer = await ask(`/api/overview?window_s=${view.windowS}`);
  if (round !== view.round) return; // the window was changed meanwhile
  if (answer.state !== "up") {
    showTrouble(answer);
    return;
  }
  view.awaySince = null;
  view.lastGood = { at: Date.now(), calls: answer.top.total.calls };
  if (answer.top.total.calls > 0) {
    drawTotals(answer.top, answer.series);
    drawHosts(answer.top, answer.series);
    await drawDetail();
    show("live", `live · ${clockTime(view.lastGood.at)}`);
  } else {
    show("empty", `listening · ${clockTime(view.lastGood.at)}`);
  }
}

async function poll() {
  if (!document.hidden) await refresh();
  setTimeout(poll, POLL_MS);
}

function markWindow() {
  for (const button of document.querySelectorAll("[data-window]")) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.window) === view.windowS));
  }
}

for (const button of document.querySelectorAll("[data-window]")) {
  button.addEventListener("click", () => {
    view.windowS = Number(button.dataset.window);
    markWindow();
    remember();
    refresh();
  });
}
markWindow();
$("detail-close").addEventListener("click", () => openDetail(view.host));
document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
$("legend").replaceChildren(
  ...STAGES.map((stage) => element("li", {}, element("i", { cls: `s-${stage}` }), stage.replace("_", " "))),
);
poll();
