//! Input: a recording of the manager's loop. Its readable part is written, and read again the same. Nothing outside
//! this process is touched.
#![no_main]

use libfuzzer_sys::fuzz_target;
use wideleaf_policies::recording::{Decoder, Encoder, Frame, RecordedOutcome};

/// Maximum total rows of all snapshots: a few bytes can stand for millions of them, again and again.
const ROWS_MAX: usize = 1 << 20;

fuzz_target!(|bytes: &[u8]| {
    let Ok(decoder) = Decoder::open(bytes) else { return };
    let mut written = Vec::new();
    let mut encoder = Encoder::start(decoder.header(), &mut written).expect("it was in a recording");
    let (mut frames, mut rows) = (0, 0);
    for frame in decoder.map_while(Result::ok) {
        frames += 1;
        match frame {
            Frame::Snapshot { at, snapshot } => {
                rows += snapshot.vms.iter().map(|vm| vm.len()).sum::<usize>();
                encoder.snapshot(at, &snapshot, &mut written);
            }
            Frame::Plan { now, actions } => encoder.plan(now, &actions, &mut written),
            Frame::Outcome(RecordedOutcome { mechanism, outcome }) => {
                encoder.outcome(&mechanism, &outcome, &mut written)
            }
            Frame::End => break,
        }
        if rows > ROWS_MAX {
            return;
        }
    }
    encoder.end(&mut written);
    let (first, again) =
        (Decoder::open(bytes).expect("it was opened before"), Decoder::open(&written).expect("it was just written"));
    assert_eq!(first.header(), again.header());
    assert!(first.take(frames).eq(again.take(frames)), "a written recording reads the same");
});
