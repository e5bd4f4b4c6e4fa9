//! The daemon's books on room in the pools: in the table, and in the state file before and after each change
//! of a pool.
//!
//! ```text
//!   prepare ─▶ room in the table ─▶ (intent in the file ─▶ pool grows)… ─▶ result in the file ─▶ the domain may start
//!   release, end of its process, abandoned ─▶ (intent in the file ─▶ pool shrinks)… ─▶ room out of table and file
//!   a daemon that starts ─▶ the result of open intents: read from the pool
//! ```
//!
//! There is one change at a time: a thread that adds or removes rooms holds `changing_pools`, so that the index of
//! a room in the table stays.

use wideleaf_control::protocol::{Answer, OrdinaryMemory, PoolRequest, RoomView};
use wideleaf_memory::pool::Granted;

use super::{Engine, now_s};
use crate::pool_reservations::{self, Room};

impl Engine {
    /// Makes room for a domain. Room from an earlier start of it goes back first.
    ///
    /// The ordinary memory that a guarantee asks for is compared with the host's and not set aside: only a
    /// guarantee that cannot be met is refused.
    pub(super) fn prepare(
        &self,
        domain: String,
        uuid: String,
        wanted: Vec<PoolRequest>,
        ordinary: Option<OrdinaryMemory>,
    ) -> Result<Answer, String> {
        let _one_at_a_time = self.changing_pools.lock();
        let refused = |error: String| format!("no room for {domain}: {error}");
        self.settle_rooms().map_err(refused)?;
        self.empty_rooms(|room| room.uuid == uuid);
        let mut room = Room::new(uuid, domain.clone(), wanted, now_s());
        let (others, to_be_kept, index) = {
            let mut table = self.table();
            let others = table.rooms.clone();
            table.rooms.push(room.clone());
            (others, table.config.host.low_free, table.rooms.len() - 1)
        };
        let mut spare = (self.doors.available)().map(|available| available.saturating_sub(to_be_kept));
        let filled = pool_reservations::take_ordinary(ordinary, &mut spare).and_then(|()| {
            pool_reservations::fill(&*self.doors.pools, &mut room, &others, spare, &mut |room| self.note(index, room))
        });
        if filled.is_ok() {
            let pages: u64 = room.grown.iter().map(Granted::pages).sum();
            tracing::info!("room for {domain}: {pages} more pages");
            self.book(index, &room);
        } else {
            self.close(index, &room);
        }
        let saved = self.write_state();
        filled.and(saved).map(|()| Answer::Done).map_err(refused)
    }

    /// Rooms and the domains that they are kept for.
    pub(super) fn rooms(&self) -> Vec<RoomView> {
        let view = |room: &Room| RoomView {
            uuid: room.uuid.clone(),
            domain: room.domain.clone(),
            wanted: room.wanted.clone(),
            has_started: room.has_started,
        };
        self.table().rooms.iter().map(view).collect()
    }

    /// Gives back the abandoned rooms.
    ///
    /// The abandoned rooms are determined before the list of running guests. A domain that starts in between runs
    /// by the time that libvirt reports it, and an earlier list would miss it.
    ///
    /// # Errors
    /// The running guests cannot be listed; nothing is given back then.
    pub(super) fn give_back_abandoned(&self) -> Result<(), String> {
        let _one_at_a_time = self.changing_pools.lock();
        let abandoned: Vec<Room> = {
            let table = self.table();
            if table.rooms.is_empty() {
                return Ok(());
            }
            table.rooms.iter().filter(|room| room.is_abandoned(now_s())).cloned().collect()
        };
        let running = self.running()?;
        for room in &mut self.table().rooms {
            if let Some(found) = running.iter().find(|found| room.belongs_to(found)) {
                room.see(found.process, now_s());
            }
        }
        if self.are_settled() {
            let is_running = |room: &Room| running.iter().any(|found| room.belongs_to(found));
            let was_abandoned =
                |room: &Room| abandoned.iter().any(|was| was.uuid == room.uuid && was.process == room.process);
            self.empty_rooms(|room| was_abandoned(room) && !is_running(room));
        }
        Ok(())
    }

    pub(super) fn give_back_rooms(&self, which: impl Fn(&Room) -> bool) {
        let _one_at_a_time = self.changing_pools.lock();
        if self.are_settled() {
            self.empty_rooms(which);
        } else {
            // The next scouting gives back unneeded room.
            self.table().rooms.iter_mut().filter(|room| which(room)).for_each(|room| room.has_started = true);
        }
    }

    /// Whether no change is open. After a second change on top of an open one, the pool's numbers would show the
    /// result of neither.
    fn are_settled(&self) -> bool {
        let settled = self.settle_rooms();
        settled.inspect_err(|error| tracing::warn!("the result of a pool's change is not known yet: {error}")).is_ok()
    }

    fn empty_rooms(&self, which: impl Fn(&Room) -> bool) {
        let mut next = 0;
        loop {
            let (index, mut room) = {
                let mut table = self.table();
                let Some((index, room)) = table.rooms.iter_mut().enumerate().skip(next).find(|(_, room)| which(room))
                else {
                    return;
                };
                // The room is unneeded: pages that cannot be given back now are tried again at the next scouting.
                room.has_started = true;
                (index, room.clone())
            };
            tracing::info!("room in the pool for {} goes back", room.domain);
            pool_reservations::empty(&*self.doors.pools, &mut room, &mut |room| self.note(index, room));
            next = index + usize::from(!self.close(index, &room));
        }
    }

    /// Determines the result of changes without a known end, by an earlier daemon or after an error.
    fn settle_rooms(&self) -> Result<(), String> {
        let open: Vec<(usize, Room)> = {
            let table = self.table();
            let open = table.rooms.iter().enumerate().filter(|(_, room)| room.open.is_some());
            open.map(|(index, room)| (index, room.clone())).collect()
        };
        for (index, mut room) in open {
            pool_reservations::settle(&*self.doors.pools, &mut room)?;
            self.book(index, &room);
        }
        Ok(())
    }

    /// Records what was done for a room, and what is about to be. When it returns, the next daemon knows.
    fn note(&self, index: usize, room: &Room) -> Result<(), String> {
        self.book(index, room);
        self.write_state()
    }

    /// Records it in the table alone. Another thread may have recorded meanwhile that its domain has come.
    fn book(&self, index: usize, room: &Room) {
        if let Some(there) = self.table().rooms.get_mut(index) {
            (there.grown, there.open) = (room.grown.clone(), room.open.clone());
        }
    }

    /// Removes a room from the table if none of it is left in the pools; returns whether it did.
    fn close(&self, index: usize, room: &Room) -> bool {
        self.book(index, room);
        let is_empty = room.grown.is_empty() && room.open.is_none();
        let mut table = self.table();
        if is_empty {
            table.rooms.remove(index);
        } else if let Some(there) = table.rooms.get_mut(index) {
            there.has_started = true;
        }
        is_empty
    }
}
