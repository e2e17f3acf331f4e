// What to change, forecasts that were asked for, and the whole account.

import * as actions from "../actions";
import type { App } from "../app";
import * as books from "../books";
import type { Finding } from "../document";
import { fill, h } from "../dom";

export function showBooks(app: App): void {
  const { facts } = app;
  const show = (finding: Finding, number: number) => actions.showFinding(app, finding, number);
  fill(
    app.frame.panel,
    books.changes(facts, show),
    facts.answers.length ? h("h2", {}, "Forecasts") : null,
    ...facts.answers.map(books.answer),
    ...(facts.ledgers ?? []).map(books.ledger),
    books.parameters(facts),
    books.health(facts),
    books.costs(facts),
  );
}
