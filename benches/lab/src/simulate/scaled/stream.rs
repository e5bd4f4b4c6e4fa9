//! STREAM: four loops over three arrays, one behind the other.

use wideleaf_policies::Bytes;

use super::{Array, Part, Scaled, WORD, in_step, largest};

/// STREAM by its size.
#[derive(Clone, Copy, Debug)]
pub struct Stream {
    /// Number of words of an array.
    pub words: u64,
}

const LINES: usize = 256 << 10;

impl Stream {
    /// The largest one within a footprint.
    pub fn within(footprint: Bytes) -> Stream {
        Stream { words: largest(8, footprint, |words| Stream { words }.bytes()) }
    }

    const fn bytes(self) -> u64 {
        3 * self.words * WORD
    }

    /// Its loops, with their words in an iteration.
    pub fn scaled(self) -> Scaled {
        let [a, b, c] = [0, 1, 2].map(|array| array * self.words * WORD);
        let part = |name, arrays: Vec<Array>| Part {
            name,
            words: (arrays.len() as u64 * self.words) as f64,
            lines: LINES,
            accesses: in_step(self.words, arrays),
        };
        let parts = vec![
            part("copy", vec![Array::load(a), Array::store(c)]),
            part("scale", vec![Array::load(c), Array::store(b)]),
            part("add", vec![Array::load(a), Array::load(b), Array::store(c)]),
            part("triad", vec![Array::load(b), Array::load(c), Array::store(a)]),
        ];
        Scaled { bytes: Bytes::new(self.bytes()), parts }
    }
}
