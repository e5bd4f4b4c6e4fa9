//! Pods and VMIs of this node, as the watches have them.

use std::collections::BTreeMap;

use kube::runtime::watcher::Event;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::objects::{PodFacts, VmiFacts};

/// Objects by UID, and the ones of a list that is not complete yet.
#[derive(Clone, Debug)]
pub struct Mirror<T> {
    now: BTreeMap<String, T>,
    coming: Option<BTreeMap<String, T>>,
    is_listed: bool,
}

impl<T> Default for Mirror<T> {
    fn default() -> Mirror<T> {
        Mirror { now: BTreeMap::new(), coming: None, is_listed: false }
    }
}

impl<T: PartialEq> Mirror<T> {
    /// Takes an event of a watch. Returns whether anything changed. The objects of a list replace all others when it is
    /// complete, so that objects which were deleted while the API server was away disappear.
    pub fn take<K>(&mut self, event: Event<K>, facts: impl Fn(&K) -> Option<(String, T)>) -> bool {
        match event {
            Event::Init => {
                self.coming = Some(BTreeMap::new());
                false
            }
            Event::InitApply(object) => {
                self.coming.get_or_insert_default().extend(facts(&object));
                false
            }
            Event::InitDone => {
                let coming = self.coming.take().unwrap_or_default();
                let is_new = !self.is_listed || coming != self.now;
                (self.now, self.is_listed) = (coming, true);
                is_new
            }
            Event::Apply(object) => facts(&object).is_some_and(|(uid, fact)| {
                let is_new = self.now.get(&uid) != Some(&fact);
                self.now.insert(uid, fact);
                is_new
            }),
            Event::Delete(object) => facts(&object).is_some_and(|(uid, _)| self.now.remove(&uid).is_some()),
        }
    }

    /// Whether a list was complete once.
    pub fn is_listed(&self) -> bool {
        self.is_listed
    }

    /// The object with that UID.
    pub fn get(&self, uid: &str) -> Option<&T> {
        self.now.get(uid)
    }

    /// All objects by UID.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        self.now.values()
    }
}

/// Whether the cluster has VMIs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum VmiApi {
    /// The API server has not been asked yet.
    #[default]
    Unknown,
    /// The cluster has no KubeVirt.
    Absent,
    /// The cluster has VMIs.
    Present {
        /// Whether their status is a resource of its own. KubeVirt's definition has none; others may.
        has_status: bool,
    },
}

/// Content of the store.
#[derive(Debug, Default)]
pub struct Objects {
    /// Pods of this node.
    pub pods: Mirror<PodFacts>,
    /// VMIs that run on this node.
    pub vmis: Mirror<VmiFacts>,
    /// Whether there can be VMIs.
    pub vmi_api: VmiApi,
}

impl Objects {
    /// Whether there is a pod or a VMI of this UID.
    pub fn has(&self, uid: &str) -> bool {
        self.pods.get(uid).is_some() || self.vmis.get(uid).is_some()
    }

    /// Whether everything was listed once: before, a guest could be assigned to the wrong object.
    pub fn are_known(&self) -> bool {
        let are_vmis_known = match self.vmi_api {
            VmiApi::Unknown => false,
            VmiApi::Absent => true,
            VmiApi::Present { .. } => self.vmis.is_listed(),
        };
        self.pods.is_listed() && are_vmis_known
    }
}

/// The store: written by the watches, read by the rounds.
#[derive(Debug, Default)]
pub struct Store {
    objects: Mutex<Objects>,
    changed: Notify,
}

impl Store {
    /// The objects, locked for moments and never across an await.
    pub fn objects(&self) -> MutexGuard<'_, Objects> {
        self.objects.lock()
    }

    /// Wakes the rounds.
    pub fn wake(&self) {
        self.changed.notify_one();
    }

    /// Returns after the next [`Store::wake`], or at once after one that was not waited for.
    pub async fn woken(&self) {
        self.changed.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(mirror: &mut Mirror<u32>, event: Event<(&'static str, u32)>) -> bool {
        mirror.take(event, |(uid, value)| Some(((*uid).to_owned(), *value)))
    }

    #[test]
    fn a_complete_list_replaces_all_and_until_then_the_earlier_one_holds() {
        let mut mirror = Mirror::default();
        assert!(!mirror.is_listed());
        for event in [Event::Init, Event::InitApply(("a", 1)), Event::InitApply(("b", 2))] {
            assert!(!take(&mut mirror, event));
        }
        assert!(take(&mut mirror, Event::InitDone) && mirror.is_listed());
        assert!(take(&mut mirror, Event::Apply(("c", 3))));
        assert!(!take(&mut mirror, Event::Apply(("c", 3))), "the same again");
        take(&mut mirror, Event::Init);
        take(&mut mirror, Event::InitApply(("b", 2)));
        assert_eq!(mirror.all().copied().collect::<Vec<_>>(), [1, 2, 3], "the list is not complete");
        assert!(take(&mut mirror, Event::InitDone));
        assert_eq!(mirror.all().copied().collect::<Vec<_>>(), [2]);
        assert!(take(&mut mirror, Event::Delete(("b", 2))) && !take(&mut mirror, Event::Delete(("b", 2))));
        assert_eq!(mirror.get("b"), None);
    }

    #[test]
    fn an_empty_first_list_is_news_and_a_second_one_is_not() {
        let mut mirror = Mirror::default();
        take(&mut mirror, Event::Init);
        assert!(take(&mut mirror, Event::InitDone));
        take(&mut mirror, Event::Init);
        assert!(!take(&mut mirror, Event::InitDone));
    }

    #[test]
    fn guests_are_assigned_once_pods_and_vmis_are_known() {
        let mut objects = Objects::default();
        let list = |mirror: &mut Mirror<PodFacts>| {
            mirror.take(Event::<()>::InitDone, |()| None);
        };
        list(&mut objects.pods);
        assert!(!objects.are_known(), "the API server was not asked for VMIs");
        objects.vmi_api = VmiApi::Absent;
        assert!(objects.are_known());
        objects.vmi_api = VmiApi::Present { has_status: false };
        assert!(!objects.are_known());
        objects.vmis.take(Event::<()>::InitDone, |()| None);
        assert!(objects.are_known());
    }
}
