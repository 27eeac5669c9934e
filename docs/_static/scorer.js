// The order of search results: guides, concepts and API first; notebooks behind them; records and the changelog last.
// `var`, because searchtools.js declares the same name where there is no scorer.
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    if (/^(decisions\/|changelog$|contributing$)/.test(docname)) return score - 200;
    if (/^(benchmarks|beside-others|the-default-coefficients|routed-models)$/.test(docname)) return score - 20;
    if (docname.startsWith("notebooks/experiments/")) return score - 20;
    if (docname.startsWith("notebooks/")) return score - 2;
    if (docname === "api/testing") return score - 8;
    return score;
  },
  objNameMatch: 60, // the whole name, or its last part
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 30,
  partialTitle: 14,
  term: 5,
  partialTerm: 2,
};

// Read from disk, pages cannot be fetched. The excerpts of results come from one file with the text of all pages, which
// docs/_extensions/search_words.py writes.
if (location.protocol === "file:") {
  const root = document.documentElement.dataset.content_root || "./";
  const texts = new Promise((resolve) => {
    const script = document.createElement("script");
    script.src = `${root}_static/page_texts.js`;
    script.onload = () => resolve(window.pageTexts);
    script.onerror = () => resolve({});
    document.head.append(script);
  });
  window.fetch = async (address) => {
    const text = (await texts)[address.slice(root.length).replace(/\.html$/, "")];
    if (!text) return new Response("");
    const main = document.createElement("div");
    main.setAttribute("role", "main");
    main.textContent = text;
    return new Response(main.outerHTML);
  };
}
