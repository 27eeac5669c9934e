// Look at the page as it lies in the window, and list what a reader could not see or read.
() => {
  const found = [];
  const say = (kind, element, what) => found.push([kind, `${path(element)}: ${what}`]);
  const path = (element) => {
    const text = (element.textContent || element.getAttribute("src") || "").trim().replace(/\s+/g, " ").slice(0, 60);
    return `<${element.tagName.toLowerCase()}> ${JSON.stringify(text)}`;
  };
  const root = document.documentElement;
  const width = root.clientWidth;
  document.querySelectorAll("details").forEach((fold) => (fold.open = true));

  if (root.scrollWidth > width + 1) {
    // name the narrowest thing that reaches out, not each box around it
    const out = [...document.body.querySelectorAll("*")].filter((e) => e.getBoundingClientRect().right > width + 1);
    const inner = out.filter((e) => !out.some((other) => other !== e && e.contains(other)));
    say("the page scrolls sideways", inner[0] || document.body, `${root.scrollWidth} px in a window of ${width} px`);
  }

  const article = document.querySelector("article") || document.querySelector("main") || document.body;
  const seen = (element) =>
    element.checkVisibility({ checkVisibilityCSS: true, checkOpacity: true }) &&
    element.getClientRects().length > 0 && element.getBoundingClientRect().width > 1;

  const main = document.querySelector("main") || article; // with the links to the neighbours
  for (const element of main.querySelectorAll("pre, code, td, th, math, img, svg, h1, h2, h3, dt, p, i")) {
    if (!seen(element)) continue;
    const own = getComputedStyle(element).overflowX;
    if (["hidden", "clip"].includes(own) && element.scrollWidth > element.clientWidth + 1 && element.tagName !== "svg") {
      say("clipped", element, `${element.scrollWidth} px in a box of ${element.clientWidth} px that does not scroll`);
      continue;
    }
    const right = Math.max(...[...element.getClientRects()].map((box) => box.right));
    for (let around = element.parentElement; around && around !== document.body; around = around.parentElement) {
      const style = getComputedStyle(around).overflowX;
      if (style === "auto" || style === "scroll") break; // within reach
      if ((style === "hidden" || style === "clip") && right > around.getBoundingClientRect().right + 1) {
        say("clipped", element, `ends at ${Math.round(right)} px, its box does at ${Math.round(around.getBoundingClientRect().right)} px`);
        break;
      }
    }
  }

  // Written for the page, so as wide as it is. Examples of docstrings and cells of notebooks scroll where they must.
  if (width >= 1200) {
    for (const code of article.querySelectorAll("div[class*='highlight-py'] pre")) {
      if (!seen(code) || code.closest("dl.py, .cell") || code.scrollWidth <= code.clientWidth + 1) continue;
      const longest = code.textContent.split("\n").reduce((a, b) => (b.length > a.length ? b : a));
      say("code wider than the page", code, `${longest.length} columns: ${longest}`);
    }
  }

  for (const picture of document.images) {
    if (picture.loading === "lazy" && !picture.complete) picture.loading = "eager";
    if (picture.complete && picture.naturalWidth === 0) say("broken picture", picture, picture.src);
  }

  // Contrast, by the definition of WCAG 2: of text against the first background behind it that is not transparent.
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = 1;
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  const known = new Map();
  const rgba = (color) => {
    if (!known.has(color)) {
      pen.clearRect(0, 0, 1, 1);
      pen.fillStyle = color;
      pen.fillRect(0, 0, 1, 1);
      known.set(color, [...pen.getImageData(0, 0, 1, 1).data]);
    }
    return known.get(color);
  };
  const luminance = ([r, g, b]) => {
    const [x, y, z] = [r, g, b].map((c) => ((c /= 255) <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * x + 0.7152 * y + 0.0722 * z;
  };
  const behind = (element) => {
    for (let around = element; around; around = around.parentElement) {
      const color = rgba(getComputedStyle(around).backgroundColor);
      if (color[3] > 200) return color;
    }
    return [255, 255, 255, 255];
  };
  const pairs = new Set();
  for (const element of article.querySelectorAll("p, li, td, th, code, pre, span, a, h1, h2, h3, dt, summary")) {
    const text = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!text || !seen(element)) continue;
    const [front, back] = [rgba(getComputedStyle(element).color), behind(element)];
    const pair = `${front} on ${back}`;
    if (front[3] < 100 || pairs.has(pair)) continue;
    pairs.add(pair);
    const [light, dark] = [luminance(front), luminance(back)].sort((a, b) => b - a);
    const contrast = (light + 0.05) / (dark + 0.05);
    if (contrast < 3) say("faint", element, `contrast ${contrast.toFixed(2)}: ${pair}`);
  }

  return {
    found,
    links: [...document.links].map((link) => link.href),
    ids: [...document.querySelectorAll("[id], a[name]")].map((e) => e.id || e.name),
    background: luminance(behind(article)),
  };
};
