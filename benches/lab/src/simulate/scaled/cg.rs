//! NPB CG: products of a sparse matrix and a vector, and the loops over vectors between them.
//!
//! ```text
//!   values │ columns │ row starts │ x │ z │ p │ q │ r
//!   ▶▶▶▶▶    ▶▶▶▶▶     ▶                ·  ▶            one product: `p[column]` is anywhere, upwards within a row
//! ```

use wideleaf_policies::Bytes;
use wideleaf_simulator::streams::{Access, Random};

use super::{Array, LINE, Layout, Part, SEED, Scaled, WORD, in_step, largest};

/// CG by its size.
#[derive(Clone, Copy, Debug)]
pub struct Cg {
    /// Number of rows, and of columns.
    pub rows: u64,
    /// Number of entries of a row that are not zero.
    pub row_entries: u64,
}

/// Entries of a row of class C: 36,121,058 in 150,000 rows.
const ROW_ENTRIES: u64 = 241;
const COLUMN: u64 = 4;
/// Conjugate gradients of an iteration; each has a product, and the residual after them another one.
const STEPS: u64 = 25;
const LINES_OF_PRODUCT: usize = 512 << 10;
const LINES_OF_VECTORS: usize = 32 << 10;
/// Entries that are followed at once: a line of values.
const GROUP: u64 = LINE / WORD;

impl Cg {
    /// The largest one within a footprint, with the entries of class C in a row.
    pub fn within(footprint: Bytes) -> Cg {
        let of = |rows| Cg { rows, row_entries: ROW_ENTRIES };
        of(largest(16, footprint, |rows| of(rows).array_starts().end))
    }

    fn array_starts(self) -> ArrayStarts {
        let mut layout = Layout::default();
        let entries = self.rows * self.row_entries;
        ArrayStarts {
            values: layout.place(entries * WORD),
            columns: layout.place(entries * COLUMN),
            starts: layout.place((self.rows + 1) * COLUMN),
            vectors: [(); 5].map(|()| layout.place(self.rows * WORD)),
            end: layout.end,
        }
    }

    /// Its loops, with their words in an iteration.
    pub fn scaled(self) -> Scaled {
        let ArrayStarts { vectors: [_, z, p, q, r], end, .. } = self.array_starts();
        let product = Part {
            name: "product",
            words: ((STEPS + 1) * self.rows * (3 * self.row_entries + 2)) as f64,
            lines: LINES_OF_PRODUCT,
            accesses: Box::new(Product::new(self)),
        };
        let vectors = |name, words: u64, arrays: Vec<Array>| Part {
            name,
            words: (STEPS * self.rows * words) as f64,
            lines: LINES_OF_VECTORS,
            accesses: in_step(self.rows, arrays),
        };
        let parts = vec![
            product,
            vectors("p·q", 2, vec![Array::load(p), Array::load(q)]),
            vectors("z += α·p", 3, vec![Array::load(p), Array::update(z)]),
            vectors("r -= α·q", 3, vec![Array::load(q), Array::update(r)]),
            vectors("r·r", 2, vec![Array::load(r)]),
            vectors("p = r + β·p", 3, vec![Array::load(r), Array::update(p)]),
        ];
        Scaled { bytes: Bytes::new(end), parts }
    }
}

/// Begin of each array.
#[derive(Clone, Copy)]
struct ArrayStarts {
    values: u64,
    columns: u64,
    starts: u64,
    /// Vectors x, z, p, q and r.
    vectors: [u64; 5],
    end: u64,
}

/// q = A·p from the middle row on, row after row, round and round. The columns of a row are spread evenly and sorted,
/// as the kernel's are.
struct Product {
    size: Cg,
    arrays: ArrayStarts,
    row: u64,
    /// Number of entries of the row that were followed.
    entry: u64,
    columns: Vec<u32>,
    /// Accesses that are ready, in reverse order.
    ready: Vec<Access>,
}

impl Product {
    fn new(size: Cg) -> Product {
        Product { size, arrays: size.array_starts(), row: size.rows / 2, entry: 0, columns: vec![], ready: vec![] }
    }

    /// Draws the columns of the row: its number is the seed, so each product has the same.
    fn draw(&mut self) {
        let mut random = Random::new(SEED + self.row);
        self.columns.clear();
        self.columns.extend((0..self.size.row_entries).map(|_| random.below(self.size.rows) as u32));
        self.columns.sort_unstable();
    }

    fn make_ready(&mut self) {
        let Cg { rows, row_entries } = self.size;
        let ArrayStarts { values, columns, starts, vectors: [_, _, p, q, _], .. } = self.arrays;
        if self.entry == row_entries {
            self.ready.push(Access::store(q + self.row * WORD));
            (self.row, self.entry) = ((self.row + 1) % rows, 0);
            return;
        }
        let is_first = self.entry == 0;
        if is_first {
            self.draw();
        }
        let now = GROUP.min(row_entries - self.entry);
        let at = self.row * row_entries + self.entry;
        let gathered = &self.columns[self.entry as usize..(self.entry + now) as usize];
        self.ready.extend(gathered.iter().rev().map(|column| Access::load(p + u64::from(*column) * WORD)));
        let repeats = now as u32;
        self.ready.push(Access { repeats, ..Access::load(columns + at * COLUMN) });
        self.ready.push(Access { repeats, ..Access::load(values + at * WORD) });
        if is_first {
            self.ready.push(Access::load(starts + self.row * COLUMN));
        }
        self.entry += now;
    }
}

impl Iterator for Product {
    type Item = Access;

    fn next(&mut self) -> Option<Access> {
        if self.ready.is_empty() {
            self.make_ready();
        }
        self.ready.pop()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_loads_each_entry_once_and_its_columns_upwards() {
        let size = Cg { rows: 100, row_entries: 11 };
        let words = 3 * 11 + 2;
        let mut sum = 0;
        let row: Vec<Access> = Product::new(size)
            .take_while(|access| {
                sum += u64::from(access.repeats);
                sum <= words
            })
            .collect();
        let [_, _, p, q, _] = size.array_starts().vectors;
        assert_eq!(row.last(), Some(&Access::store(q + 50 * WORD)));
        let p = p..q;
        let gathered: Vec<u64> = row.iter().map(|access| access.address).filter(|at| p.contains(at)).collect();
        assert!(gathered.len() == 11 && gathered.is_sorted(), "{gathered:?}");
    }
}
