// What Python wrote into the page: pytracer/export/report.py and packed.py say the same.

export interface CategoryRow {
  category: string;
  at_peak: number;
  own_peak: number;
  at_end: number;
  allocations: number;
}

export interface Step {
  step: number;
  peak_bytes: number;
  growth_bytes: number;
  start_bytes: number;
  end_bytes: number;
  allocations: number;
  start_ns: number;
  end_ns: number;
  last_change: number;
  forward_ns: number;
  backward_ns: number;
  optimizer_ns: number;
  device_forward_ns: number | null;
  device_backward_ns: number | null;
  device_optimizer_ns: number | null;
}

export interface LedgerRow {
  name: string;
  bytes: number | null;
  level: number;
  known_by: string;
  moment: string;
}

export interface Ledger {
  at: string;
  rows: LedgerRow[];
  verdict: string; // how much the rows leave unexplained
  notes: string[];
}

export interface PerParameter {
  category: string;
  bytes: number;
  per_parameter: number | null;
  at_peak: number | null;
  at_rest: number | null;
  textbook: string;
}

export interface Finding {
  kind: string;
  bytes: number;
  at_peak: number;
  line: string;
  module: string;
  evidence: string;
  change: string;
  at: number | null; // the change after which its allocations sum up to its bytes
  turns: number | null; // growth: they sum up to so many times the bytes; null: each is larger
}

/** A change that makes the peak smaller, in the words of the terminal. */
export interface Change {
  kind: string;
  head: string; // of all changes of this kind
  said: string;
  saves: number | null; // bytes of the peak
  code: string; // to paste; "" if there is none
  finding: number | null; // its place in the list of findings
}

export interface Health {
  name: string;
  severity: string;
  count: number;
  meaning: string;
  advice: string;
}

export interface Cost {
  name: string;
  calls: number;
  forward_ns: number;
  backward_ns: number;
  time_ns: number;
  time_share: number;
  forward_flops: number;
  backward_flops: number;
  time_ratio: number | null;
  expected_ratio: number | null;
  verdict: string;
}

/** Names that mean the same as other names in the page's first trace. */
export interface Aligned {
  modules: Record<string, string>; // without wrappers
  lines: Record<string, string>; // the first trace's line, and this one's
}

export interface Rest {
  count: number;
  at: number[];
  levels: Record<string, number[]>;
}

export interface Facts {
  name: string;
  device: string;
  begin_ns: number;
  end_ns: number;
  idle_ns: number;
  first_step: number;
  allocations: number;
  shown: number;
  before: number;
  changes: number;
  kinds: number;
  groups: number;
  unit_ns: number;
  address_unit: number;
  regions: [number, number, number][];
  first_row: number;
  peak_change: number;
  calls_libraries: boolean; // some lines are not the program's own
  capacity: number | null; // of the card; null where it is not known, or there is none
  peak: { bytes: number; time_ns: number; when: string };
  categories: CategoryRow[];
  steps: Step[];
  phases: [number, number, number][];
  modules: [number, number, number, number][];
  most_bands: number;
  reserved: { times_ns: number[]; bytes: number[] };
  device_use: { time_ns: number; bytes: number; when: string }[];
  failures: { time_ns: number; bytes: number }[];
  ledgers?: Ledger[];
  parameters?: number;
  per_parameter?: PerParameter[];
  findings?: Finding[];
  notes?: string[]; // what to know before the changes
  advice?: Change[];
  together?: string; // what all of them save; "" if they are not several
  answers: string[];
  aligned: Aligned;
  health: Health[];
  costs: Cost[];
  rest: Rest | null;
}

/** A rank of a job. */
export interface Rank {
  rank: number;
  host: string;
  device: string;
  status: string;
  peak: number;
  step: number | null; // of the peak
  by_category: Record<string, number>; // at the peak
  differs: boolean;
  set: number | null; // its place on the page; null: it is not on it
  file: string;
}

export interface Spread {
  name: string;
  lowest: number;
  median: number;
  highest: number;
  ranks: string; // that have the highest
  is_time: boolean;
}

/** What all ranks say together, in the words of the terminal. */
export interface Job {
  head: string;
  world_size: number;
  ranks: Rank[];
  spreads: Spread[];
  said: [title: string, text: string][]; // who differs, who is missing, findings of all
}

export interface Words {
  strings: string[];
  categories: string[];
  phases: string[];
  texts: string[];
  colors: Record<string, string>;
}

export interface Document extends Words {
  format: number;
  version: string;
  meanings: Record<string, string>; // of the words on the page
  job: Job | null; // of which the sets are ranks
  sets: Facts[];
  source: Record<string, [number, string[]]>;
}
