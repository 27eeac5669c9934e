// The order of search results: guides and API first, notebooks and concepts with them, records and the changelog last.
const Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    if (/^(decisions\/|changelog)/.test(docname)) return score * 0.1 - 10;
    return score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
