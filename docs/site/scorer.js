/* The order of the results of a search: pages for users before decisions and records of changes. */

var Scorer = {
  score: ([page, , , , score]) => {
    if (/\/adr\/|^CHANGELOG|^CONTRIBUTING|^SECURITY|^benchmarks|\/proof$|\/scale$/.test(page)) {
      return score - 100;
    }
    return /\/(how-to|tutorial)\/|\/(log-events|expected-events|versions)$/.test(page) ? score + 5 : score;
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
