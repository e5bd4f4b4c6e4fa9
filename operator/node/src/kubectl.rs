//! The kubectl plugin: shows what the agents of all nodes publish. It reads objects of the API server alone.
//!
//! ```text
//!   kubectl wideleaf list | explain VM | top
//!        │ VMIs with their condition, pods with the annotation, nodes with the labels
//!        ▼
//!   rows ──▶ a table as of `wideleaf list`, or JSON
//! ```

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, ValueEnum};
use comfy_table::{Cell, ContentArrangement};
use k8s_openapi::api::core::v1::{Node, Pod};
use k8s_openapi::jiff::Timestamp;
use kube::api::{ListParams, ObjectList};
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::core::DynamicObject;
use kube::{Api, Client, Config, ResourceExt as _};
use serde::Serialize;

use crate::PREFIX;
use crate::amounts::{NOTHING, UNKNOWN, bytes, old_scans};
use crate::details::{Details, STATUS};
use crate::figures::{RESOURCE, label_names};
use crate::objects::{CREATED_BY, quantity_bytes, vmi_resource};
use crate::reason::with_causes;
use crate::table::{number, prose_table, table};
use crate::verdict::CONDITION;

/// Number of objects in a page of a list.
const PAGE: u32 = 250;

/// Upper bound on the VMs that `top` shows.
const TOP_MAX: usize = 20;

/// Shows how much of the memory of VMs is in huge pages, as the agents of their nodes publish it.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "kubectl-wideleaf",
    bin_name = "kubectl wideleaf",
    version,
    after_help = "Examples:
  kubectl wideleaf list -A          all VMs of the cluster
  kubectl wideleaf explain db       why the memory of a VM is not in huge pages
  kubectl wideleaf top              nodes with their free memory, and the VMs with most memory in 4 KiB pages"
)]
pub struct Arguments {
    #[command(subcommand)]
    command: Command,
    /// Namespace of the VMs; without it that of the context
    #[arg(short, long, global = true, value_name = "NAME")]
    namespace: Option<String>,
    /// VMs of all namespaces
    #[arg(short = 'A', long, global = true)]
    all_namespaces: bool,
    /// Format of the output
    #[arg(short, long, global = true, value_enum, default_value = "table")]
    output: Format,
    /// Context of the kubeconfig to use
    #[arg(long, global = true, value_name = "NAME")]
    context: Option<String>,
    /// File that names the API server; without it KUBECONFIG, then ~/.kube/config
    #[arg(long, global = true, value_name = "FILE")]
    kubeconfig: Option<PathBuf>,
}

#[derive(Clone, Debug, Subcommand)]
enum Command {
    /// List VMs with the share of their memory in huge pages
    List,
    /// Explain why the memory of a VM is not in huge pages
    Explain(ExplainArguments),
    /// Show nodes with their free memory, and the VMs with most memory in 4 KiB pages
    Top,
}

#[derive(Args, Clone, Debug)]
struct ExplainArguments {
    /// Name of the VM (of its VMI, or of its pod)
    #[arg(value_name = "VM")]
    vm: String,
}

/// Format of the output.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text for people.
    #[default]
    Table,
    /// JSON for programs.
    Json,
}

/// One VM as it is published.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct VmRow {
    /// Namespace of the VM.
    pub namespace: String,
    /// Name of its VMI or pod.
    pub name: String,
    /// `VirtualMachineInstance` or `Pod`.
    pub kind: String,
    /// Status of the condition: `True`, `False` or `Unknown`; `None` where no agent has published one.
    pub covered: Option<String>,
    /// Reason of the condition.
    pub reason: Option<String>,
    /// Message of the condition.
    pub message: Option<String>,
    /// Facts from the annotation.
    pub details: Option<Details>,
}

/// One node as it is published.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct NodeRow {
    /// Name of the node.
    pub name: String,
    /// Labels of the agent, whole GiB.
    pub labels_gib: BTreeMap<String, u64>,
    /// Value of the extended resource, in GiB.
    pub huge_gib: Option<u64>,
}

/// Runs the plugin. Returns its output.
///
/// # Errors
/// One line: the cluster does not answer, or has no such VM.
pub async fn run(arguments: &Arguments) -> Result<String, String> {
    let client = connect(arguments).await?;
    let scope = match (arguments.all_namespaces, &arguments.namespace) {
        (true, _) => None,
        (false, Some(namespace)) => Some(namespace.clone()),
        (false, None) => Some(client.default_namespace().to_owned()),
    };
    let (vms, now) = (vms(&client, scope.as_deref()).await?, Timestamp::now());
    match &arguments.command {
        Command::List => output(arguments.output, &vms, |vms| list_text(vms, scope.is_none(), now)),
        Command::Explain(ExplainArguments { vm }) => {
            let of_name: Vec<&VmRow> = vms.iter().filter(|row| row.name == *vm).collect();
            match of_name[..] {
                [row] => output(arguments.output, row, explain_text),
                [] => Err(format!(
                    "there is no VM {vm:?} in {}: see `kubectl wideleaf list -A`",
                    scope_text(scope.as_deref())
                )),
                _ => Err(format!("{} VMs are called {vm:?}: name one by its namespace with -n", of_name.len())),
            }
        }
        Command::Top => {
            let nodes = all(&Api::<Node>::all(client.clone())).await?.iter().map(node_row).collect::<Vec<_>>();
            let top = Top { nodes, vms: most_in_base_pages(vms) };
            output(arguments.output, &top, |top| top_text(top, scope.is_none(), now))
        }
    }
}

/// Nodes and VMs of `top`.
#[derive(Clone, Debug, Serialize)]
struct Top {
    nodes: Vec<NodeRow>,
    vms: Vec<VmRow>,
}

async fn connect(arguments: &Arguments) -> Result<Client, String> {
    let failed = |error: &dyn std::error::Error| {
        let why = error.to_string().replace('\n', " ");
        format!("cannot find the API server: {why}; name a file with --kubeconfig, or set KUBECONFIG")
    };
    let options = KubeConfigOptions { context: arguments.context.clone(), ..KubeConfigOptions::default() };
    let config = match &arguments.kubeconfig {
        Some(path) => {
            let file = Kubeconfig::read_from(path).map_err(|error| failed(&error))?;
            Config::from_custom_kubeconfig(file, &options).await.map_err(|error| failed(&error))?
        }
        None => Config::from_kubeconfig(&options).await.map_err(|error| failed(&error))?,
    };
    Client::try_from(config).map_err(|error| failed(&error))
}

fn output<T: Serialize + ?Sized>(format: Format, value: &T, text: impl FnOnce(&T) -> String) -> Result<String, String> {
    match format {
        Format::Table => Ok(text(value)),
        Format::Json => {
            let json = serde_json::to_string_pretty(value).map_err(|error| format!("cannot write JSON: {error}"))?;
            Ok(json + "\n")
        }
    }
}

/// All objects, page by page.
async fn all<K>(api: &Api<K>) -> Result<Vec<K>, String>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    list(api).await.map_err(|error| {
        format!("the API server does not answer: {}; check it with `kubectl version`", with_causes(&error))
    })
}

async fn list<K>(api: &Api<K>) -> Result<Vec<K>, kube::Error>
where
    K: Clone + std::fmt::Debug + serde::de::DeserializeOwned,
{
    let mut found = Vec::new();
    let mut page = ListParams::default().limit(PAGE);
    loop {
        let ObjectList { items, metadata, .. } = api.list(&page).await?;
        found.extend(items);
        match metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => page = page.continue_token(&token),
            None => return Ok(found),
        }
    }
}

/// VMIs with their conditions, which are on their pods where KubeVirt keeps the status to itself, and pods that have
/// the annotation without being a VMI's.
async fn vms(client: &Client, namespace: Option<&str>) -> Result<Vec<VmRow>, String> {
    let resource = vmi_resource();
    let vmis = match namespace {
        Some(namespace) => Api::<DynamicObject>::namespaced_with(client.clone(), namespace, &resource),
        None => Api::<DynamicObject>::all_with(client.clone(), &resource),
    };
    let vmis = match list(&vmis).await {
        Ok(vmis) => vmis,
        // The cluster has no KubeVirt.
        Err(kube::Error::Api(status)) if status.code == 404 => Vec::new(),
        Err(error) => {
            let why = with_causes(&error);
            return Err(format!("cannot list VMs: {why}; check it with `kubectl auth can-i list vmi`"));
        }
    };
    let pods = match namespace {
        Some(namespace) => Api::<Pod>::namespaced(client.clone(), namespace),
        None => Api::<Pod>::all(client.clone()),
    };
    let (mut rows, mut of_vmis) = (Vec::new(), BTreeMap::<String, Vec<(Option<String>, VmRow)>>::new());
    for pod in all(&pods).await? {
        if has_ended(&pod) {
            continue;
        }
        let node = pod.spec.as_ref().and_then(|spec| spec.node_name.clone());
        let pod = serde_json::to_value(pod).and_then(serde_json::from_value::<DynamicObject>);
        let pod = pod.map_err(|error| format!("cannot read a pod: {error}"))?;
        let row = row(&pod, "Pod", &format!("{PREFIX}{CONDITION}"));
        if let (Some(uid), Some(_)) = (pod.labels().get(CREATED_BY), &row.covered) {
            of_vmis.entry(uid.clone()).or_default().push((node, row));
        } else if row.details.is_some() {
            rows.push(row);
        }
    }
    for vmi in vmis {
        let mut row = row(&vmi, "VirtualMachineInstance", CONDITION);
        let of_pods = vmi.uid().and_then(|uid| of_vmis.remove(&uid)).unwrap_or_default();
        let of_pod = on_node(of_pods, vmi.data["status"]["nodeName"].as_str()).filter(|_| row.covered.is_none());
        if let Some(VmRow { covered, reason, message, .. }) = of_pod {
            (row.covered, row.reason, row.message) = (covered, reason, message);
        }
        rows.push(row);
    }
    rows.sort_by(|one, other| (&one.namespace, &one.name).cmp(&(&other.namespace, &other.name)));
    Ok(rows)
}

/// Whether all containers of a pod have ended: its condition is then of a guest that is no longer there.
fn has_ended(pod: &Pod) -> bool {
    let phase = pod.status.as_ref().and_then(|status| status.phase.as_deref());
    matches!(phase, Some("Succeeded" | "Failed"))
}

/// Of a VMI's pods that of the node which runs the guest. During a migration there are two, and that of the target has
/// no guest yet.
fn on_node(mut pods: Vec<(Option<String>, VmRow)>, node: Option<&str>) -> Option<VmRow> {
    let there = pods.iter().position(|(of_pod, _)| node.is_some() && of_pod.as_deref() == node);
    if pods.is_empty() { None } else { Some(pods.swap_remove(there.unwrap_or(0)).1) }
}

fn row(object: &DynamicObject, kind: &str, type_: &str) -> VmRow {
    let conditions = object.data["status"]["conditions"].as_array();
    let condition = conditions.and_then(|all| all.iter().find(|one| one["type"] == type_));
    let text = |name: &str| condition.and_then(|of| of[name].as_str()).map(str::to_owned);
    VmRow {
        namespace: object.namespace().unwrap_or_default(),
        name: object.name_any(),
        kind: kind.to_owned(),
        covered: text("status"),
        reason: text("reason"),
        message: text("message"),
        details: object.annotations().get(STATUS).and_then(|text| Details::parse(text)),
    }
}

fn node_row(node: &Node) -> NodeRow {
    let label = |name: &str| Some((name.to_owned(), node.labels().get(name)?.parse().ok()?));
    let capacity = node.status.as_ref().and_then(|status| status.capacity.as_ref()?.get(RESOURCE));
    NodeRow {
        name: node.name_any(),
        labels_gib: label_names().filter_map(label).collect(),
        huge_gib: capacity.and_then(|quantity| quantity_bytes(&quantity.0)),
    }
}

/// VMs with most memory in base pages first.
fn most_in_base_pages(mut vms: Vec<VmRow>) -> Vec<VmRow> {
    let base = |row: &VmRow| row.details.as_ref().map_or(0, |details| details.base_4k_mib);
    vms.sort_by_key(|row| std::cmp::Reverse(base(row)));
    vms.truncate(TOP_MAX);
    vms
}

fn scope_text(namespace: Option<&str>) -> String {
    namespace.map_or("this cluster".to_owned(), |namespace| format!("namespace {namespace}"))
}

/// Text of another program without control characters, so that it does not control the terminal.
fn clean(text: &str) -> String {
    wideleaf_control::client::one_line(text)
}

const NO_VM: &str = "no VM here has a condition of wideleaf: is wideleaf-node on the nodes?\n";

fn list_text(vms: &[VmRow], has_namespaces: bool, now: Timestamp) -> String {
    if vms.is_empty() {
        return NO_VM.to_owned();
    }
    let header = ["VM", "node", "covered", "on 2m+", "goal", "4k", "2m", "1g", "policy", "guarantee", "reason"];
    let mut rows = table(&has_namespaces.then_some("namespace").into_iter().chain(header).collect::<Vec<_>>());
    rows.set_content_arrangement(ContentArrangement::Dynamic);
    for vm in vms {
        let details = vm.details.as_ref();
        let text = |of: &dyn Fn(&Details) -> Option<String>| {
            details.and_then(of).map_or(UNKNOWN.to_owned(), |text| clean(&text))
        };
        let mib = |of: fn(&Details) -> u64| number(text(&|details| Some(bytes(of(details) << 20))));
        let cells = [
            Cell::new(clean(&vm.name)),
            Cell::new(text(&|details| Some(details.node.clone()))),
            Cell::new(vm.covered.as_deref().map_or(UNKNOWN.to_owned(), clean)),
            number(text(&|details| details.coverage_percent.map(|percent| format!("{percent:.1} %")))),
            number(text(&|details| Some(format!("{} %", details.goal_percent)))),
            mib(|details| details.base_4k_mib),
            mib(|details| details.huge_2m_mib),
            mib(|details| details.giant_1g_mib),
            Cell::new(details.map_or(UNKNOWN.to_owned(), |of| of.policy.as_deref().map_or(NOTHING.to_owned(), clean))),
            Cell::new(text(&|details| Some(details.guarantee.clone()))),
            Cell::new(vm.reason.as_deref().map_or(UNKNOWN.to_owned(), clean)),
        ];
        rows.add_row(has_namespaces.then(|| Cell::new(clean(&vm.namespace))).into_iter().chain(cells));
    }
    let name = |vm: &VmRow| match has_namespaces {
        true => clean(&format!("{}/{}", vm.namespace, vm.name)),
        false => clean(&vm.name),
    };
    let age = |vm: &VmRow| vm.details.as_ref()?.scan_age_s(now);
    let old = old_scans(vms.iter().map(|vm| (name(vm), age(vm)))).map(|old| format!("  {old}\n"));
    format!("{rows}\n{}", old.unwrap_or_default())
}

fn explain_text(vm: &VmRow) -> String {
    let mut out = String::new();
    let mut line = |name: &str, value: &str| {
        let _ = writeln!(out, "{name:<12} {}", clean(value));
    };
    line("VM", &format!("{}/{}", vm.namespace, vm.name));
    line("covered", vm.covered.as_deref().unwrap_or(UNKNOWN));
    line("reason", vm.reason.as_deref().unwrap_or(UNKNOWN));
    if let Some(message) = &vm.message {
        line("message", message);
    }
    let Some(details) = &vm.details else {
        out.push_str("no agent has published facts about it: is wideleaf-node on its node?\n");
        return out;
    };
    let mib = |mib: u64| bytes(mib << 20);
    line("node", &details.node);
    line("guest", &details.guest);
    let coverage = details.coverage_percent.map_or(UNKNOWN.to_owned(), |percent| format!("{percent:.1} %"));
    line("on 2m+", &format!("{coverage} of present memory; {} % are enough", details.goal_percent));
    let (base, huge, giant) = (mib(details.base_4k_mib), mib(details.huge_2m_mib), mib(details.giant_1g_mib));
    line("pages", &format!("{base} in 4 KiB, {huge} in 2 MiB, {giant} in 1 GiB"));
    if let Some(scanned) = &details.scanned {
        line("scanned", scanned);
    }
    line("care", &details.care);
    line("policy", details.policy.as_deref().unwrap_or(NOTHING));
    line("guarantee", &details.guarantee);
    let asked = [
        ("policy", &details.asked_policy),
        ("guarantee", &details.asked_guarantee),
        ("out-of-reach", &details.asked_out_of_reach),
    ];
    let asked = asked.into_iter().filter_map(|(name, value)| Some(format!("{name} {}", value.as_ref()?)));
    let asked = asked.collect::<Vec<String>>().join(", ");
    line("asked for", if asked.is_empty() { "nothing, by annotations" } else { &asked });
    if let Some(changed) = &details.changed {
        line("since", changed);
    }
    if let Some(explanation) = &details.explanation {
        let mut rows = prose_table(&["first reason"]);
        rows.add_row([Cell::new(clean(explanation))]);
        let _ = writeln!(out, "{rows}");
    }
    out
}

fn top_text(top: &Top, has_namespaces: bool, now: Timestamp) -> String {
    let short = |name: &str| name.trim_start_matches(PREFIX).trim_end_matches("-gib").to_owned();
    let header: Vec<String> = label_names().map(short).collect();
    let mut columns = vec!["node (GiB)", "huge-gib"];
    columns.extend(header.iter().map(String::as_str));
    let mut rows = table(&columns);
    for node in &top.nodes {
        let labels = label_names().map(|name| number(node.labels_gib.get(name).map_or(UNKNOWN.into(), u64::to_string)));
        let first = [Cell::new(clean(&node.name)), number(node.huge_gib.map_or(UNKNOWN.into(), |gib| gib.to_string()))];
        rows.add_row(first.into_iter().chain(labels));
    }
    format!("{rows}\n{}", list_text(&top.vms, has_namespaces, now))
}

#[cfg(test)]
mod tests;
