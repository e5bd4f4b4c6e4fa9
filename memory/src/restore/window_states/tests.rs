use super::*;

const NOW: Moment = Moment::START;

fn at(ms: u64) -> Moment {
    Moment::after_start(Duration::from_millis(ms))
}

/// Windows 0 to 3 are registered, 4 is not; 2 has no contents.
fn states() -> WindowStates {
    WindowStates::new(5, vec![0], std::slice::from_ref(&(0..4)), |row| row != 2, Mapping::Base)
}

fn claim(states: &WindowStates, row: Row, worker: Worker) -> Claim {
    match states.touched(row, worker, NOW) {
        Touched::Fill(claim) => claim,
        other => panic!("{other:?}"),
    }
}

fn fill(states: &WindowStates, row: Row, settled: Settled) {
    let claim = claim(states, row, 0);
    assert!(states.begin_placing(row, claim));
    states.settle(row, settled);
}

#[test]
fn each_window_is_filled_by_one_thread() {
    let states = states();
    let first = claim(&states, 1, 0);
    assert_eq!(states.touched(1, 1, at(2)), Touched::Wait);
    assert!(states.begin_placing(1, first));
    assert_eq!(states.touched(1, 1, at(3)), Touched::Wait);
    assert_eq!(states.settle(1, Settled::LetGo(Mapping::Huge)), [at(2), at(3)]);
    assert_eq!(states.touched(1, 1, NOW), Touched::Wake);
    assert_eq!((states.left(), states.touched(4, 0, NOW)), (2, Touched::Wake));
    assert_eq!(states.touched(2, 0, NOW), Touched::LetGo);
    states.settle(2, Settled::Kept);
    assert_eq!((states.left(), states.touched(2, 0, NOW)), (2, Touched::Page));
}

fn next_behind(states: &WindowStates, worker: Worker) -> Option<(Row, Claim)> {
    states.next_of_background(worker, NOW, || vec![1, 3, 2, 0])
}

fn finish(states: &WindowStates, (row, claim): (Row, Claim)) {
    assert!(states.begin_placing(row, claim));
    states.settle(row, Settled::LetGo(Mapping::Huge));
}

#[test]
fn the_background_is_one_thread_at_a_time_and_skips_what_is_filled() {
    let states = states();
    fill(&states, 1, Settled::LetGo(Mapping::Huge));
    let in_hand = next_behind(&states, 7).expect("row 3");
    assert_eq!((in_hand.0, next_behind(&states, 6)), (3, None));
    finish(&states, in_hand);
    let in_hand = next_behind(&states, 6).expect("row 0: row 2 has no contents");
    assert_eq!((in_hand.0, next_behind(&states, 7)), (0, None));
    finish(&states, in_hand);
    assert_eq!((next_behind(&states, 7), states.left()), (None, 0));
}

#[test]
fn a_second_thread_fills_behind_while_the_guest_waits_for_the_window_of_the_first() {
    let states = states();
    let first = next_behind(&states, 7).expect("row 1");
    assert_eq!(states.touched(first.0, 5, NOW), Touched::Wait);
    let second = next_behind(&states, 6).expect("row 3");
    assert_eq!((second.0, next_behind(&states, 5)), (3, None), "the third thread stays free for touches");
    finish(&states, first);
    assert_eq!(next_behind(&states, 7), None, "the guest goes on, and one thread is enough");
    finish(&states, second);
    assert_eq!(next_behind(&states, 7).map(|(row, _)| row), Some(0));
}

#[test]
fn a_touch_of_a_window_that_nothing_fills_is_answered_beside_one_thread_behind() {
    let states = states();
    let behind = next_behind(&states, 7).expect("row 1");
    let touched = claim(&states, 3, 6);
    assert_eq!(next_behind(&states, 5), None, "two windows are in hand");
    finish(&states, behind);
    assert_eq!(next_behind(&states, 7).map(|(row, _)| row), Some(0));
    finish(&states, (3, touched));
}

#[test]
fn a_window_behind_that_is_lost_or_fails_keeps_no_other_from_being_filled() {
    let states = states();
    let late = next_behind(&states, 7).expect("row 1");
    assert_eq!(states.take_overdue(at(100), Duration::from_millis(100)).len(), 1);
    let again = next_behind(&states, 6).expect("row 1 again");
    assert_eq!((again.0, states.begin_placing(late.0, late.1)), (1, false));
    assert_eq!(states.panicked(6, None), Some((1, true)), "the second loss");
    let next = next_behind(&states, 5).expect("row 3");
    assert_eq!((next.0, states.cannot_read(3, next.1)), (3, true));
    assert_eq!(next_behind(&states, 5).map(|(row, _)| row), Some(0));
}

#[test]
fn an_overdue_claim_is_taken_away_once_and_does_not_count_any_more() {
    let states = states();
    let late = claim(&states, 0, 5);
    assert_eq!(states.take_overdue(at(99), Duration::from_millis(100)), []);
    let taken = states.take_overdue(at(100), Duration::from_millis(100));
    assert_eq!(taken, [Overdue { row: 0, worker: 5, waited: Duration::from_millis(100) }]);
    let second = claim(&states, 0, 6);
    assert!(!states.begin_placing(0, late), "the guest may have written it since");
    assert!(!states.cannot_read(0, late), "what it read is of no interest");
    let named = states.take_overdue(at(300), Duration::from_millis(100));
    assert_eq!(named.len(), 1, "named too, but there is no third thread for the same place");
    assert_eq!(states.take_overdue(at(400), Duration::from_millis(100)), []);
    assert!(states.begin_placing(0, second));
    states.settle(0, Settled::LetGo(Mapping::Huge));
    assert_eq!(states.left(), 2);
}

#[test]
fn the_window_of_a_thread_that_panicked_is_free_again_and_fails_at_the_second_panic() {
    let states = states();
    claim(&states, 3, 5);
    assert_eq!(states.panicked(5, None), Some((3, false)));
    assert_eq!(states.panicked(5, None), None, "between two windows");
    claim(&states, 3, 6);
    assert_eq!(states.panicked(6, None), Some((3, true)));
    assert_eq!((states.touched(3, 0, NOW), states.left()), (Touched::Never, 2));
    let placing = claim(&states, 0, 6);
    assert!(states.begin_placing(0, placing));
    assert_eq!(states.panicked(6, Some(0)), Some((0, true)), "some of its pages may be there");
}

#[test]
fn after_the_end_nothing_is_filled_and_what_is_registered_is_known() {
    let states = states();
    fill(&states, 0, Settled::LetGo(Mapping::Base));
    let begun = claim(&states, 1, 0);
    assert_eq!(states.close(), [1, 2, 3]);
    assert!(!states.begin_placing(1, begun));
    assert_eq!(states.touched(3, 0, NOW), Touched::Wait);
    assert!(states.next_of_background(0, NOW, Vec::new).is_none());
}

#[test]
fn the_rest_is_let_go_when_all_stored_windows_are_filled() {
    let states = states();
    [0, 1].into_iter().for_each(|row| fill(&states, row, Settled::LetGo(Mapping::Huge)));
    fill(&states, 3, Settled::Kept);
    assert_eq!((states.left(), states.rest_to_let_go()), (0, vec![2, 3]));
    assert!(states.close().is_empty());
}

#[test]
fn borders_between_mappings_are_counted_as_they_come_and_go() {
    // rows      0  1  2  3 | 4
    // mapping   R  R  R  R | B      one border
    let states = states();
    let borders = |states: &WindowStates| states.table().borders;
    assert_eq!(borders(&states), 1);
    fill(&states, 1, Settled::LetGo(Mapping::Huge)); // R H R R B
    assert_eq!(borders(&states), 3);
    fill(&states, 0, Settled::LetGo(Mapping::Huge)); // H H R R B
    assert_eq!(borders(&states), 2);
    fill(&states, 3, Settled::LetGo(Mapping::Base)); // H H R B B
    assert_eq!(borders(&states), 2);
    states.touched(2, 0, NOW);
    states.settle(2, Settled::LetGo(Mapping::Base)); // H H B B B
    assert_eq!((borders(&states), states.may_cut()), (1, true));
}
