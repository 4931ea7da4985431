/* The order of the results of a search: pages whose title has the words, and pages for users before
 * decisions and records of changes. */

var Scorer = {
  score: ([page, title, , , score]) => {
    if (/\/adr\/|^CHANGELOG|^CONTRIBUTING|^SECURITY|^benchmarks|\/proof$|\/scale$/.test(page)) {
      return score - 100;
    }
    const words = new URLSearchParams(location.search).get("q")?.toLowerCase().match(/[a-z]{3,}/g);
    const of_page = title.split(" > ")[0].toLowerCase();
    const named = (words ?? []).filter((word) => of_page.includes(word.replace(/s$/, "")));
    const is_for_users = /\/(how-to|tutorial)\/|\/(log-events|expected-events|versions)$/.test(page);
    return score + 5 * named.length + (is_for_users ? 5 : 0);
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
