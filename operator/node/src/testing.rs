//! An API server and a wideleafd that tests make up.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt as _, stream};
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use kube::Client;
use parking_lot::{Mutex, MutexGuard};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::UnixListener;
use wideleaf_control::protocol::{Answer, Envelope, Reply, Request as Ask};

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// One request that the API server received.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    pub(crate) method: Method,
    pub(crate) path: String,
    pub(crate) query: String,
    pub(crate) content_type: String,
    pub(crate) body: Value,
}

#[derive(Default)]
struct Server {
    objects: BTreeMap<String, Value>,
    received: Vec<Received>,
    /// Status of each answer, instead of the one that it would have.
    failing: Option<u16>,
    /// Status of each answer about one path and its subresources.
    failing_at: BTreeMap<String, u16>,
    /// Number of applies that find the object changed, before one finds it as it was.
    overtaken: usize,
    /// Parts of bodies of an apply that belong to another manager.
    owned: Vec<&'static str>,
    /// Lines of the next watches, in order; a watch without lines stays open and says nothing.
    watches: VecDeque<Vec<Value>>,
    /// An element that another writer puts in place before each patch in JSON.
    races: Option<Value>,
}

/// An API server in memory.
#[derive(Clone, Default)]
pub(crate) struct FakeApi(Arc<Mutex<Server>>);

impl FakeApi {
    pub(crate) fn client(&self) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<kube::client::Body>| {
            let api = api.clone();
            async move {
                let (head, body) = request.into_parts();
                let body = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
                let text = |name: &str| head.headers.get(name).and_then(|text| text.to_str().ok()).unwrap_or_default();
                Ok::<_, Infallible>(api.answer(Received {
                    method: head.method.clone(),
                    path: head.uri.path().to_owned(),
                    query: head.uri.query().unwrap_or_default().to_owned(),
                    content_type: text("content-type").to_owned(),
                    body: serde_json::from_slice(&body).unwrap_or(Value::Null),
                }))
            }
        });
        Client::new(service, "default")
    }

    fn server(&self) -> MutexGuard<'_, Server> {
        self.0.lock()
    }

    /// Puts an object at its path, like `/api/v1/nodes/n1`, with a new version.
    pub(crate) fn put(&self, path: &str, object: Value) {
        let mut object = object;
        object["metadata"]["resourceVersion"] = self.server().received.len().to_string().into();
        self.server().objects.insert(path.to_owned(), object);
    }

    pub(crate) fn remove(&self, path: &str) {
        self.server().objects.remove(path);
    }

    pub(crate) fn object(&self, path: &str) -> Value {
        self.server().objects.get(path).cloned().unwrap_or(Value::Null)
    }

    pub(crate) fn fail(&self, code: Option<u16>) {
        self.server().failing = code;
    }

    /// Fails requests for that path, and for its subresources; no longer with `None`.
    pub(crate) fn fail_at(&self, path: &str, code: Option<u16>) {
        let mut server = self.server();
        match code {
            Some(code) => drop(server.failing_at.insert(path.to_owned(), code)),
            None => drop(server.failing_at.remove(path)),
        }
    }

    /// Answers that many applies as if the object had changed in between.
    pub(crate) fn overtake(&self, times: usize) {
        self.server().overtaken = times;
    }

    pub(crate) fn own(&self, part: &'static str) {
        self.server().owned.push(part);
    }

    pub(crate) fn race(&self, condition: Option<Value>) {
        self.server().races = condition;
    }

    pub(crate) fn watch(&self, lines: Vec<Value>) {
        self.server().watches.push_back(lines);
    }

    /// Requests since the last call.
    pub(crate) fn received(&self) -> Vec<Received> {
        std::mem::take(&mut self.server().received)
    }

    /// Requests that change something, since the last call.
    pub(crate) fn writes(&self) -> Vec<Received> {
        self.received().into_iter().filter(|one| one.method != Method::GET).collect()
    }

    pub(crate) fn requests(&self) -> usize {
        self.server().received.len()
    }

    fn answer(&self, request: Received) -> Response<Body> {
        let mut server = self.server();
        server.received.push(request.clone());
        if let Some(code) = server.failing {
            return failure(code, "the test says so");
        }
        let of_path = |path: &String| request.path == *path || request.path.starts_with(&format!("{path}/"));
        if let Some((_, code)) = server.failing_at.iter().find(|(path, _)| of_path(path)) {
            return failure(*code, "the test says so of this object");
        }
        match request.method {
            Method::GET if request.query.contains("watch=true") => {
                let lines = server.watches.pop_front().unwrap_or_default();
                let lines = lines.into_iter().map(|line| Ok(Frame::data(Bytes::from(format!("{line}\n")))));
                let body = StreamBody::new(stream::iter(lines).chain(stream::pending()));
                Response::new(body.boxed_unsync())
            }
            Method::GET if server.objects.contains_key(&request.path) => success(&server.objects[&request.path]),
            Method::GET if request.path.ends_with("s") && !request.path.contains("/nodes/") => {
                let prefix = format!("{}/", request.path.trim_start_matches('/'));
                let last = request.path.rsplit('/').next().unwrap_or_default().to_owned();
                let of_kind = |path: &&String| path.contains(&format!("/{last}/")) || path.starts_with(&prefix);
                let items: Vec<Value> =
                    server.objects.iter().filter(|(path, _)| of_kind(path)).map(|(_, object)| object.clone()).collect();
                if items.is_empty() && request.path.contains("kubevirt.io") {
                    return failure(404, "no such kind");
                }
                success(&page(items, &request.query))
            }
            Method::GET => failure(404, "not found"),
            Method::POST => success(&request.body),
            Method::PATCH => patch(&mut server, &request),
            _ => failure(405, "not allowed"),
        }
    }
}

/// The page of a list that the query asks for. Of label selectors only that of the agents' pods counts.
fn page(items: Vec<Value>, query: &str) -> Value {
    let number = |name: &str| {
        let value = query.split('&').find_map(|pair| pair.strip_prefix(name)?.strip_prefix('='));
        value.and_then(|value| value.parse::<usize>().ok())
    };
    let is_of_agents = query.contains("wideleaf-node");
    let is_agent = |object: &Value| object["metadata"]["labels"]["app.kubernetes.io/component"] == "wideleaf-node";
    let items: Vec<Value> = items.into_iter().filter(|item| !is_of_agents || is_agent(item)).collect();
    let from = number("continue").unwrap_or(0);
    let until = number("limit").map_or(items.len(), |limit| from + limit).min(items.len());
    let mut metadata = json!({"resourceVersion": "7"});
    if until < items.len() {
        metadata["continue"] = until.to_string().into();
    }
    json!({"kind": "List", "apiVersion": "v1", "metadata": metadata, "items": items[from.min(until)..until]})
}

fn patch(server: &mut Server, request: &Received) -> Response<Body> {
    let (path, is_status) = match request.path.strip_suffix("/status") {
        Some(path) => (path.to_owned(), true),
        None => (request.path.clone(), false),
    };
    let version = server.received.len().to_string();
    let owned = server.owned.clone();
    let race = server.races.clone();
    let is_overtaken = request.content_type == "application/apply-patch+yaml" && server.overtaken > 0;
    server.overtaken -= usize::from(is_overtaken);
    let Some(object) = server.objects.get_mut(&path) else { return failure(404, "not found") };
    match request.content_type.as_str() {
        "application/apply-patch+yaml" => {
            let text = request.body.to_string();
            if is_overtaken {
                return failure(409, "the object has been modified");
            }
            if owned.iter().any(|part| text.contains(part)) {
                return conflict();
            }
            if request.body["metadata"]["uid"] != object["metadata"]["uid"] {
                return failure(409, "uid mismatch");
            }
            for field in ["labels", "annotations"] {
                merge(&mut object["metadata"][field], &request.body["metadata"][field]);
            }
            for field in ["capacity", "allocatable"].iter().filter(|_| is_status) {
                merge(&mut object["status"][field], &request.body["status"][field]);
            }
            let applied = request.body["status"]["conditions"].as_array().cloned().unwrap_or_default();
            for condition in applied {
                let mut all = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
                all.retain(|one| one["type"] != condition["type"]);
                all.push(condition);
                object["status"]["conditions"] = all.into();
            }
        }
        "application/json-patch+json" => {
            if let Some(condition) = race {
                object["status"]["conditions"] = json!([condition]);
                object["metadata"]["resourceVersion"] = format!("{version}0").into();
            }
            let patch: json_patch::Patch = serde_json::from_value(request.body.clone()).expect("a patch");
            if let Err(error) = json_patch::patch(object, &patch) {
                return failure(422, &error.to_string());
            }
        }
        other => return failure(415, other),
    }
    object["metadata"]["resourceVersion"] = version.into();
    success(object)
}

fn merge(into: &mut Value, from: &Value) {
    for (name, value) in from.as_object().into_iter().flatten() {
        into[name.as_str()] = value.clone();
    }
}

fn success(value: &Value) -> Response<Body> {
    Response::new(Full::from(value.to_string()).boxed_unsync())
}

/// The answer to an apply of a field that another manager has.
fn conflict() -> Response<Body> {
    let cause = json!({"reason": "FieldManagerConflict", "message": "conflict with \"other\"", "field": ".any"});
    failed(409, "conflict with \"other\"", &json!({"causes": [cause]}))
}

fn failure(code: u16, why: &str) -> Response<Body> {
    failed(code, why, &json!({}))
}

fn failed(code: u16, why: &str, details: &Value) -> Response<Body> {
    let status = json!({"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": why,
        "reason": "Test", "code": code, "details": details});
    let mut response = success(&status);
    *response.status_mut() = StatusCode::from_u16(code).expect("a status");
    response
}

/// Answer of the daemon to a request; `None`: it says nothing, for ever.
type Answering = Box<dyn FnMut(&Ask) -> Option<Reply> + Send>;

/// A wideleafd in this process. It ends when it is dropped, and its socket stays.
pub(crate) struct FakeDaemon {
    asked: Arc<Mutex<Vec<Ask>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for FakeDaemon {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl FakeDaemon {
    pub(crate) fn at(socket: &Path, answer: impl FnMut(&Ask) -> Option<Reply> + Send + 'static) -> FakeDaemon {
        // The socket of an earlier one.
        let _ = std::fs::remove_file(socket);
        let listener = UnixListener::bind(socket).expect("a new socket");
        let asked = Arc::<Mutex<Vec<Ask>>>::default();
        let answering: Arc<Mutex<Answering>> = Arc::new(Mutex::new(Box::new(answer)));
        let heard = Arc::clone(&asked);
        let task = tokio::spawn(async move {
            let mut connections = tokio::task::JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                let (heard, answering) = (Arc::clone(&heard), Arc::clone(&answering));
                connections.spawn(async move {
                    let mut stream = BufReader::new(stream);
                    let mut line = String::new();
                    while stream.read_line(&mut line).await.is_ok_and(|bytes| bytes > 0) {
                        let Envelope { request, .. } = serde_json::from_str(&line).expect("a request");
                        line.clear();
                        let reply = (answering.lock())(&request);
                        heard.lock().push(request);
                        let Some(reply) = reply else { return std::future::pending().await };
                        let text = serde_json::to_string(&reply).expect("it serialises") + "\n";
                        if stream.write_all(text.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                });
            }
        });
        FakeDaemon { asked, task }
    }

    /// Requests since the last call.
    pub(crate) fn asked(&self) -> Vec<Ask> {
        std::mem::take(&mut *self.asked.lock())
    }
}

pub(crate) fn ok(answer: Answer) -> Option<Reply> {
    Some(Reply::Ok(Box::new(answer)))
}

pub(crate) fn refusal(why: &str) -> Option<Reply> {
    Some(Reply::Error(why.to_owned()))
}
