// The training steps.

import * as actions from "../actions";
import type { App } from "../app";
import * as books from "../books";
import { fill } from "../dom";

export function showSteps(app: App): void {
  const go = (step: number) => actions.toStep(app, step);
  const compare = (step: number) => actions.compareSteps(app, step - 1, step);
  fill(app.frame.panel, books.steps(app.facts, { go, compare }));
}
