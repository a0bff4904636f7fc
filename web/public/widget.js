// The number of a widget that only reads: see getWidget in gateway/widget.go.
const AGAIN_MS = 10_000; // until the next attempt, after a refusal; others are made by the browser

const number = document.querySelector('[data-events]');

function listen() {
  const stream = new EventSource(number.dataset.events);
  stream.addEventListener('count', ({ data }) => (number.textContent = JSON.parse(data).count.toLocaleString(undefined, { notation: 'compact' })));
  stream.addEventListener('error', () => stream.readyState === EventSource.CLOSED && setTimeout(listen, AGAIN_MS));
}
listen();
