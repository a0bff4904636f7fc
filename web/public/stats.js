// What the server remembers of a page.
import { at } from './at.js';

/** Asks for it; undefined if the server remembers nothing (--page-stats 0), or does not answer. */
export async function remembered(page, query = '') {
  const answer = await fetch(at(`${encodeURIComponent(page)}/stats?${query}`)).catch(() => undefined);
  return answer?.ok ? answer.json() : undefined;
}

/** Says what there was: "Last 24 hours: at most 80 at 12:05, 1,200 visitors". */
export function summary({ peak, visitors }, last = '24 hours') {
  const at = new Date(peak.at).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
  return `Last ${last}: at most ${peak.count.toLocaleString('en')} at ${at}, ${visitors.toLocaleString('en')} ${visitors === 1 ? 'visitor' : 'visitors'}`;
}
