// What the server remembers of a page.
import { at } from './at.js';

/**
 * What an answer says; undefined if it refuses, if there is none, and if it is no JSON: a proxy whose session has ended
 * answers with its log-in page.
 */
export const said = async (answer) => (answer?.ok ? answer.json().catch(() => undefined) : undefined);

/** Asks for it; undefined if the server remembers nothing (--page-stats 0), or does not answer. */
export async function remembered(page, query = '') {
  const answer = await fetch(at(`${encodeURIComponent(page)}/stats?${query}`)).catch(() => undefined);
  return said(answer);
}

/** Whether a point is a day, which begins at midnight UTC. */
export const isDay = (point) => point?.person_minutes !== undefined;

/** The date of a day. */
export const date = (at) => new Date(at).toLocaleDateString([], { timeZone: 'UTC', day: 'numeric', month: 'short' });

const number = (n) => n.toLocaleString('en', { maximumFractionDigits: 0 });

/**
 * Says what there was: "Last 24 hours: at most 80 at 12:05, 1,200 visitors", of days
 * "Last 30 days: at most 80 on 9 Oct, 1,200 visitors on a day with any, 3,000 person-hours".
 */
export function summary({ peak, points, visitors }, last = '24 hours') {
  const most = `Last ${last}: at most ${number(peak.count)}`;
  if (isDay(points[0])) {
    const hours = points.reduce((sum, point) => sum + point.person_minutes, 0) / 60;
    const busy = points.filter((point) => point.visitors).length;
    return `${most} on ${date(peak.at)}, ${number(visitors / (busy || 1))} visitors on a day with any, ${number(hours)} person-hours`;
  }
  const at = new Date(peak.at).toLocaleTimeString([], { hour: '2-digit', minute: '2-digit' });
  return `${most} at ${at}, ${number(visitors)} ${visitors === 1 ? 'visitor' : 'visitors'}`;
}
