"use strict";
const root = document.documentElement;
const figures = JSON.parse(document.getElementById("figures").textContent);
const palette = ["#3b82d6", "#e08214", "#2a9d6f", "#c2439a", "#8c6bd1", "#b0892b", "#4db6c9", "#d6554c"];
const color = (name) => getComputedStyle(root).getPropertyValue(name).trim();

// Names beside a y axis may be long; the room below an x axis is reckoned in `layout`, and Plotly would
// draw some figures again and again to find it.
function axis(own, name) {
  return { gridcolor: color("--line"), zerolinecolor: color("--line"), automargin: name[0] === "y", ...own };
}

// Rows that the legend needs below a figure, so that it takes height of its own and not the plot's.
function legendRows(traces, width) {
  const widths = traces.filter((trace) => trace.name && trace.showlegend !== false).map((trace) => 7 * trace.name.length + 46);
  if (widths.length < 2) return 0;
  const columns = Math.max(1, Math.floor(width / Math.max(...widths)));
  return Math.ceil(widths.length / columns);
}

// The room that the names beside a y axis take: those of horizontal bars may be long.
function namesWidth(traces) {
  const names = traces.flatMap((trace) => (trace.orientation === "h" ? trace.y : []));
  return Math.max(50, ...names.map((name) => 7 * name.length));
}

// The page's own looks beside what a figure asks for.
function layout(asked, traces, width) {
  const narrow = window.innerWidth < 600;
  const below = (asked.xaxis?.title ? 56 : 34) + 20 * legendRows(traces, width - namesWidth(traces) - 30);
  const made = {
    colorway: palette, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("--ink"), size: narrow ? 11 : 12 },
    margin: { l: 50, r: 16, t: 28, b: below }, hovermode: narrow ? "closest" : "x unified", height: (narrow ? 220 : 280) + below,
    modebar: { bgcolor: "rgba(0,0,0,0)", color: color("--line"), activecolor: color("--soft") },
    legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, traceorder: "normal" },
    hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--ink") } },
    ...asked,
  };
  for (const name of Object.keys(made)) if (/^[xy]axis/.test(name)) made[name] = axis(made[name], name);
  made.xaxis = axis(made.xaxis, "x");
  made.yaxis = axis(made.yaxis, "y");
  made.shapes = (made.shapes || []).map((shape) =>
    shape.type === "rect" ? { ...shape, fillcolor: color("--shade") } : { ...shape, line: { ...shape.line, color: color("--soft") } });
  return made;
}

const buttons = [["zoom2d", "pan2d", "resetScale2d", "toImage"]];
const config = { responsive: true, displaylogo: false, modeBarButtons: buttons };

function draw(number) {
  const figure = figures[number];
  if (figure.layout.height) document.getElementById(`f${number}`).style.minHeight = 0;
  const width = document.getElementById(`f${number}`).clientWidth;
  return Plotly.react(`f${number}`, figure.data, layout(figure.layout, figure.data, width), config);
}

// One figure a task: those at the top show while the others are still to come.
async function drawAll() {
  for (let number = 0; number < figures.length; number++) {
    await draw(number);
    await new Promise((resume) => setTimeout(resume));
  }
  document.body.dataset.drawn = figures.length;
}

function setScheme(name) {
  root.dataset.scheme = name;
}

async function unpack() {
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

const dark = window.matchMedia("(prefers-color-scheme: dark)");
setScheme(dark.matches ? "dark" : "light");
dark.addEventListener("change", () => { setScheme(dark.matches ? "dark" : "light"); if (window.Plotly) drawAll(); });
document.getElementById("scheme").addEventListener("click", () => {
  setScheme(root.dataset.scheme === "dark" ? "light" : "dark");
  if (window.Plotly) drawAll();
});

// The link of the section that is being read.
const links = new Map([...document.querySelectorAll("nav a")].map((link) => [link.hash.slice(1), link]));
const reading = new IntersectionObserver((entries) => {
  for (const entry of entries) links.get(entry.target.id)?.classList.toggle("here", entry.isIntersecting);
}, { rootMargin: "-20% 0px -70% 0px" });
document.querySelectorAll("section").forEach((section) => reading.observe(section));

if (figures.length) {
  unpack().then(drawAll).catch((error) => {
    const text = document.createElement("p");
    text.className = "bad";
    text.textContent = `The figures could not be drawn: ${error}. They need a browser from 2023 or newer.`;
    document.querySelector("main").prepend(text);
    throw error;
  });
} else {
  document.body.dataset.drawn = 0;
}
