"use strict"
// Shows the charts one after the other, gives them the page's colours, and switches what the cluster is coloured by.
const read = id => JSON.parse(document.getElementById(id).textContent)
const items = read("items"), palettes = read("palettes")
const root = document.documentElement
const system = matchMedia("(prefers-color-scheme: dark)")
const plots = {}
let chosen = null, dark = system.matches

function paint(plot) {
  const ink = dark ? "#e8ebef" : "#14181f", soft = dark ? "#a2acb9" : "#5b6573"
  const line = dark ? "#323a45" : "#dfe3e8", idle = dark ? "#3a424d" : "#d9dde3"
  for (const model of plot.references()) {
    const is = name => model.type == name
    if (model.type?.endsWith("Axis"))
      model.setv({axis_label_text_color: soft, major_label_text_color: soft,
        axis_line_color: model.axis_line_color && soft, major_tick_line_color: model.major_tick_line_color && soft})
    else if (is("Grid")) model.grid_line_color = model.grid_line_color && line
    else if (model.tags?.includes("ink")) model.setv(is("Span") ? {line_color: ink} : {text_color: ink})
    else if (is("GlyphRenderer") && model.name == "idle") model.glyph.fill_color = {value: idle}
  }
}

function theme(wanted) {
  dark = wanted
  root.classList.toggle("dark", dark)
  for (const plot of Object.values(plots)) paint(plot)
}

function colour(axis) {
  for (const button of document.querySelectorAll("[data-axis]"))
    button.setAttribute("aria-pressed", String(button.dataset.axis == axis))
  for (const legend of document.querySelectorAll("[data-legend]")) legend.hidden = legend.dataset.legend != axis
  const cells = plots.cluster?.renderers.find(renderer => renderer.name == "cells")
  if (cells == null) return
  const mapper = cells.glyph.fill_color.transform, source = cells.data_source
  mapper.setv({palette: palettes[axis].colours, high: palettes[axis].degree - 0.5})
  cells.glyph.fill_color = {field: axis, transform: mapper}
  if (source.data.ink == null) return
  source.data.ink = Array.from(source.data[axis], group => readable(palettes[axis].colours[group]))
  source.change.emit()
}

// Black or white, whichever stands out more (W3C's relative luminance).
function readable(colour) {
  const [r, g, b] = [1, 3, 5].map(at => (parseInt(colour.slice(at, at + 2), 16) / 255) ** 2.2)
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#14181f" : "#ffffff"
}

async function show(name) {
  const views = await Bokeh.embed.embed_item(items[name], `chart-${name}`)
  const plot = (Array.isArray(views) ? views : [...views])[0].model
  // A finger scrolls the page; a drag zooms only where there is a mouse.
  if (matchMedia("(pointer: coarse)").matches) plot.toolbar.active_drag = null
  plots[name] = plot
  paint(plot)
  if (name == "cluster") colour(document.querySelector("[data-axis][aria-pressed=true]").dataset.axis)
}

async function showAll() {
  for (const name of Object.keys(items)) await show(name)
  root.dataset.ready = "true"
}

document.getElementById("theme").addEventListener("click", () => theme(chosen = !dark))
system.addEventListener("change", () => theme(chosen ?? system.matches))
addEventListener("beforeprint", () => {
  theme(false)
  for (const plot of Object.values(plots)) Bokeh.index.find_one(plot)?.paint()  // now: paper does not wait for a frame
})
addEventListener("afterprint", () => theme(chosen ?? system.matches))
for (const button of document.querySelectorAll("[data-axis]"))
  button.addEventListener("click", () => colour(button.dataset.axis))
for (const button of document.querySelectorAll("[data-series]"))
  button.addEventListener("click", () => {
    const {chart, series} = button.dataset, shown = button.getAttribute("aria-pressed") != "true"
    button.setAttribute("aria-pressed", String(shown))
    for (const renderer of plots[chart].renderers) if (renderer.name == series) renderer.visible = shown
  })
theme(dark)
showAll()
