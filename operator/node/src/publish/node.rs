//! Writes of the node's figures: the labels, and the extended resource with which pods ask for huge pages.
//!
//! ```text
//!   news, or a look is due ─▶ GET ─▶ labels that differ ─────▶ applied
//!                                └─▶ a capacity that differs ─▶ applied ─▶ the kubelet copies it to allocatable,
//!                                                                          or the next write has both
//! ```
//!
//! A field of another manager is left to it, with one event.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node, ObjectReference};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{Patch, PatchParams};
use kube::{Api, ResourceExt as _};
use serde_json::{Value, json};
use wideleaf_control::view::PromotableView;

use super::{ApiError, LOOK_EVERY, Publisher, Rest, called, complain, merge};
use crate::MANAGER;
use crate::figures::{Figures, RESOURCE, label_names};
use crate::objects::quantity_bytes;

/// Least time between two writes to the node.
const NODE_EVERY: Duration = Duration::from_secs(60);

/// State of the node's writes.
#[derive(Debug, Default)]
pub(super) struct NodeState {
    figures: Option<Figures>,
    /// What the node had at the latest look.
    seen: Option<Figures>,
    looked_at: Option<Instant>,
    written_at: Option<Instant>,
    /// Whether the kubelet has still to copy what was written.
    is_copy_expected: bool,
    are_labels_left: bool,
    is_capacity_left: bool,
    is_allocatable_left: bool,
    /// Rests after failures. Those of objects do not count, so that the node has its turn.
    rest: Rest,
    complaint: Option<String>,
}

impl Publisher {
    /// Writes the node's figures where that is due.
    pub async fn node(&mut self, promotable: &PromotableView, held: u64, now: Instant) {
        let state = &mut self.of_node;
        let figures = Figures::after(state.figures.as_ref().or(state.seen.as_ref()), promotable, held);
        state.figures = Some(figures);
        let since = |at: Option<Instant>| at.map(|at| now.saturating_duration_since(at));
        let is_write_due = is_new_to(state) && since(state.written_at).is_none_or(|since| since >= NODE_EVERY);
        let look_every = if state.is_copy_expected { NODE_EVERY } else { LOOK_EVERY };
        let is_look_due = since(state.looked_at).is_none_or(|since| since >= look_every);
        let is_left = state.are_labels_left && state.is_capacity_left;
        if is_left || !(is_write_due || is_look_due) || !state.rest.is_over(now) {
            return;
        }
        let mut state = std::mem::take(&mut self.of_node);
        match self.write_node(&mut state, promotable, held, now).await {
            Ok(()) => {
                self.answered();
                (state.complaint, state.rest) = (None, Rest::default());
            }
            Err(ApiError::Down(error)) => {
                self.failed(&error);
                state.rest.begin(now);
            }
            Err(error) => {
                self.answered();
                match error {
                    ApiError::Failed(_) => state.rest.begin(now),
                    _ => (state.looked_at, state.written_at) = (Some(now), Some(now)),
                }
                complain(&mut state.complaint, &format!("node {}", self.node), &error);
            }
        }
        self.of_node = state;
    }

    async fn write_node(
        &self,
        state: &mut NodeState,
        promotable: &PromotableView,
        held: u64,
        now: Instant,
    ) -> Result<(), ApiError> {
        let node = called(self.nodes().get(&self.node)).await?;
        if state.looked_at.is_none() {
            // Figures that an earlier agent has published are held as if they were this one's.
            state.figures = Some(Figures::after(figures_of(&node).as_ref(), promotable, held));
        }
        state.looked_at = Some(now);
        let Some(figures) = state.figures.clone() else { return Ok(()) };
        let has_labels = self.write_labels(state, &node, &figures).await?;
        let has_resource = self.write_resource(state, &node, &figures).await?;
        let has_written = has_labels || has_resource;
        if has_written {
            state.written_at = Some(now);
        }
        self.counters.write("node", if has_written { "done" } else { "same" });
        state.seen = Some(figures);
        Ok(())
    }

    /// Writes the labels where they differ. Returns whether it wrote.
    async fn write_labels(&self, state: &mut NodeState, node: &Node, figures: &Figures) -> Result<bool, ApiError> {
        let has = |(name, gib): (&&str, &u64)| node.labels().get(*name) == Some(&gib.to_string());
        if state.are_labels_left || figures.labels.iter().all(has) {
            return Ok(false);
        }
        let labels: BTreeMap<&str, String> =
            figures.labels.iter().map(|(name, gib)| (*name, gib.to_string())).collect();
        let body = self.node_body(node, json!({"labels": labels}), &json!({}));
        match called(self.nodes().patch(&self.node, &applied(), &Patch::Apply(&body))).await {
            Ok(_) => Ok(true),
            Err(ApiError::Owned(why)) => {
                state.are_labels_left = true;
                self.leave_of_node(node, "labels are", &why).await;
                Ok(false)
            }
            Err(error) => Err(self.counted("node", error)),
        }
    }

    /// Writes the extended resource where it differs: its capacity, which the kubelet copies within some seconds. Where
    /// it has not done so since the last write, or there is no kubelet, also what is allocatable. Returns whether it
    /// wrote.
    async fn write_resource(&self, state: &mut NodeState, node: &Node, figures: &Figures) -> Result<bool, ApiError> {
        let status = node.status.clone().unwrap_or_default();
        let has = |of: &Option<BTreeMap<String, Quantity>>| {
            let quantity = of.as_ref().and_then(|of| of.get(RESOURCE));
            // The API server writes 1000 as `1k`.
            quantity.is_some_and(|quantity| quantity_bytes(&quantity.0) == Some(figures.huge_gib))
        };
        let (is_capacity, is_allocatable) = (has(&status.capacity), has(&status.allocatable));
        let has_kubelet = status.node_info.as_ref().is_some_and(|info| !info.kubelet_version.is_empty());
        let is_both = (!has_kubelet || is_capacity && !is_allocatable) && !state.is_allocatable_left;
        state.is_copy_expected = false;
        if state.is_capacity_left || is_capacity && (!is_both || is_allocatable) {
            return Ok(false);
        }
        state.is_copy_expected = !is_both && !state.is_allocatable_left;
        let mut written = self.write_status(node, figures, is_both).await;
        if let (Err(ApiError::Owned(why)), true) = (&written, is_both) {
            state.is_allocatable_left = true;
            self.leave_of_node(node, &format!("{RESOURCE} of allocatable is"), why).await;
            written = self.write_status(node, figures, false).await;
        }
        match written {
            Ok(()) => Ok(true),
            Err(ApiError::Owned(why)) => {
                (state.is_capacity_left, state.is_copy_expected) = (true, false);
                self.leave_of_node(node, &format!("{RESOURCE} is"), &why).await;
                Ok(false)
            }
            Err(error) => Err(self.counted("node", error)),
        }
    }

    /// Applies the capacity alone, or what is allocatable as well.
    async fn write_status(&self, node: &Node, figures: &Figures, is_both: bool) -> Result<(), ApiError> {
        let capacity = json!({RESOURCE: figures.huge_gib.to_string()});
        let status = match is_both {
            true => json!({"status": {"capacity": capacity, "allocatable": capacity}}),
            false => json!({"status": {"capacity": capacity}}),
        };
        let body = self.node_body(node, json!({}), &status);
        called(self.nodes().patch_status(&self.node, &applied(), &Patch::Apply(&body))).await.map(drop)
    }

    fn nodes(&self) -> Api<Node> {
        Api::all(self.client.clone())
    }

    /// Body of an apply to that object of the node.
    fn node_body(&self, node: &Node, metadata: Value, rest: &Value) -> Value {
        let named = json!({"name": self.node, "uid": node.uid().unwrap_or_default()});
        let mut body = json!({"apiVersion": "v1", "kind": "Node", "metadata": named});
        merge(&mut body["metadata"], &metadata);
        merge(&mut body, rest);
        body
    }

    /// Says once that fields of the node belong to another writer.
    async fn leave_of_node(&self, node: &Node, fields: &str, why: &str) {
        let about = ObjectReference {
            api_version: Some("v1".into()),
            kind: Some("Node".into()),
            name: Some(self.node.clone()),
            uid: node.uid(),
            ..ObjectReference::default()
        };
        self.say_left("node", &about, &format!("node {}", self.node), fields, why).await;
    }
}

/// Whether the node does not have the figures yet, as far as the agent knows.
fn is_new_to(state: &NodeState) -> bool {
    state.figures != state.seen
}

/// Figures that a node has, where it has all of them.
fn figures_of(node: &Node) -> Option<Figures> {
    let label = |name: &'static str| Some((name, node.labels().get(name)?.parse().ok()?));
    let labels = label_names().map(label).collect::<Option<BTreeMap<_, _>>>()?;
    let huge_gib = quantity_bytes(&node.status.as_ref()?.capacity.as_ref()?.get(RESOURCE)?.0)?;
    Some(Figures { labels, huge_gib })
}

/// Parameters of an apply, never forced.
fn applied() -> PatchParams {
    PatchParams::apply(MANAGER)
}
