package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/util/workqueue"
	"k8s.io/klog/v2"
)

// Requests in progress while objects are made: enough to keep the server busy, few enough for its own limits.
const madeAtOnce = 24

// paperLabel marks the nodes of this program: pods on other nodes are left to their kubelets.
const paperLabel = "fleet-lab/paper"

// What a node says that it has, beside the resources that are named.
var paperCapacity = v1.ResourceList{
	v1.ResourceCPU:    resource.MustParse("32"),
	v1.ResourceMemory: resource.MustParse("256Gi"),
	v1.ResourcePods:   resource.MustParse("250"),
}

// guestNamespace has all guests that --guests makes.
const guestNamespace = "guests"

var vmiResource = schema.GroupVersionResource{
	Group: "kubevirt.io", Version: "v1", Resource: "virtualmachineinstances",
}

// amounts are values of --resource.
type amounts v1.ResourceList

func (a amounts) String() string { return fmt.Sprint(v1.ResourceList(a)) }
func (a amounts) Set(text string) error {
	name, amount, _ := strings.Cut(text, "=")
	quantity, err := resource.ParseQuantity(amount)
	if err == nil {
		a[v1.ResourceName(name)] = quantity
	}
	return err
}

type paper struct {
	client  kubernetes.Interface
	objects dynamic.Interface
	prefix  string
	count   int
}

func (p *paper) node(index int) string {
	return fmt.Sprintf("%s-%04d", p.prefix, index%p.count)
}

// nodes makes nodes and guests, and then is the kubelet of all these nodes.
func nodes(ctx context.Context, arguments []string) error {
	began := time.Now()
	flags := flag.NewFlagSet("nodes", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	kubeconfig := flags.String("kubeconfig", "", "")
	count := flags.Int("count", 0, "")
	prefix := flags.String("prefix", "paper", "")
	guests := flags.Int("guests", 0, "")
	capacity := amounts{}
	flags.Var(capacity, "resource", "")
	err := flags.Parse(arguments)
	if err != nil || *kubeconfig == "" || *count < 1 || *guests < 0 || flags.NArg() > 0 {
		return errUsage{"cannot make nodes: --kubeconfig FILE and --count N of at least 1 are needed, " +
			"--resource is NAME=AMOUNT, --guests is a number"}
	}
	// Libraries report each lost connection, and a test that reads no output would make that wait.
	klog.LogToStderr(false)
	klog.SetOutput(io.Discard)
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return fmt.Errorf("cannot make nodes: %w", err)
	}
	config.QPS = -1 // without a limit
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("cannot make nodes: %w", err)
	}
	objects, err := dynamic.NewForConfig(config)
	if err != nil {
		return fmt.Errorf("cannot make nodes: %w", err)
	}
	p := &paper{client: client, objects: objects, prefix: *prefix, count: *count}
	if err := p.each(ctx, *count, func(ctx context.Context, index int) error {
		return p.makeNode(ctx, p.node(index), capacity)
	}); err != nil {
		return fmt.Errorf("cannot make nodes: %w", err)
	}
	if *guests > 0 {
		if err := p.makeNamespace(ctx); err != nil {
			return fmt.Errorf("cannot make guests: %w", err)
		}
		if err := p.each(ctx, *guests, p.makeGuest); err != nil {
			return fmt.Errorf("cannot make guests: %w", err)
		}
	}
	line, err := json.Marshal(map[string]any{
		"nodes": *count, "guests": *guests, "made_after_ms": time.Since(began).Milliseconds(),
	})
	if err != nil {
		return err
	}
	fmt.Println(string(line))
	p.runPods(ctx)
	return nil
}

// each calls one for all indices, several at once, and ends at the first error.
func (p *paper) each(ctx context.Context, count int, one func(context.Context, int) error) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(madeAtOnce)
	for index := range count {
		group.Go(func() error { return one(ctx, index) })
	}
	return group.Wait()
}

// makeNode makes a node that is ready, or makes one ready that exists.
func (p *paper) makeNode(ctx context.Context, name string, more amounts) error {
	capacity := paperCapacity.DeepCopy()
	for name, amount := range more {
		capacity[name] = amount
	}
	node := &v1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: name,
		Labels: map[string]string{
			paperLabel: "true", v1.LabelHostname: name, v1.LabelOSStable: "linux", v1.LabelArchStable: "amd64",
		},
	}}
	node, err := p.client.CoreV1().Nodes().Create(ctx, node, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		node, err = p.client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
	}
	if err != nil {
		return err
	}
	now := metav1.Now()
	node.Status.Capacity, node.Status.Allocatable = capacity, capacity
	node.Status.Conditions = []v1.NodeCondition{{
		Type: v1.NodeReady, Status: v1.ConditionTrue, Reason: "Paper", LastHeartbeatTime: now, LastTransitionTime: now,
	}}
	_, err = p.client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
	return err
}

func (p *paper) makeNamespace(ctx context.Context) error {
	space := &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: guestNamespace}}
	_, err := p.client.CoreV1().Namespaces().Create(ctx, space, metav1.CreateOptions{})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	// No pod can be made before its account exists.
	for {
		_, err := p.client.CoreV1().ServiceAccounts(guestNamespace).Get(ctx, "default", metav1.GetOptions{})
		if err == nil || !apierrors.IsNotFound(err) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// makeGuest makes a running VMI and the running pod of its virt-launcher, with the labels that KubeVirt gives them.
func (p *paper) makeGuest(ctx context.Context, index int) error {
	name, node := fmt.Sprintf("guest-%05d", index), p.node(index)
	vmi := &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": "kubevirt.io/v1",
		"kind":       "VirtualMachineInstance",
		"metadata": map[string]any{
			"name": name, "namespace": guestNamespace,
			"labels": map[string]any{"kubevirt.io/nodeName": node},
		},
		"spec": map[string]any{"domain": map[string]any{"memory": map[string]any{"guest": "4Gi"}}},
		"status": map[string]any{"phase": "Running", "nodeName": node, "conditions": []any{
			map[string]any{"type": "Ready", "status": "True"},
		}},
	}}
	vmi, err := p.objects.Resource(vmiResource).Namespace(guestNamespace).Create(ctx, vmi, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	yes := true
	pod := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: "virt-launcher-" + name, Namespace: guestNamespace,
			Labels: map[string]string{
				"kubevirt.io": "virt-launcher", "kubevirt.io/created-by": string(vmi.GetUID()),
				"vm.kubevirt.io/name": name,
			},
			Annotations: map[string]string{"kubevirt.io/domain": name},
			OwnerReferences: []metav1.OwnerReference{{
				APIVersion: "kubevirt.io/v1", Kind: "VirtualMachineInstance", Name: name, UID: vmi.GetUID(),
				Controller: &yes, BlockOwnerDeletion: &yes,
			}},
		},
		Spec: v1.PodSpec{NodeName: node, Containers: []v1.Container{{Name: "compute", Image: "virt-launcher"}}},
	}
	pod, err = p.client.CoreV1().Pods(guestNamespace).Create(ctx, pod, metav1.CreateOptions{})
	if err != nil {
		return err
	}
	return p.setRunning(ctx, pod)
}

// setRunning reports a pod as running and ready; one that a job made as done.
func (p *paper) setRunning(ctx context.Context, pod *v1.Pod) error {
	pod = pod.DeepCopy()
	now := metav1.Now()
	isStarted, owner := true, metav1.GetControllerOf(pod)
	isDone := owner != nil && owner.Kind == "Job"
	pod.Status.Phase, pod.Status.StartTime = v1.PodRunning, &now
	state := v1.ContainerState{Running: &v1.ContainerStateRunning{StartedAt: now}}
	isReady := v1.ConditionTrue
	if isDone {
		pod.Status.Phase, isReady = v1.PodSucceeded, v1.ConditionFalse
		state = v1.ContainerState{Terminated: &v1.ContainerStateTerminated{Reason: "Completed", FinishedAt: now}}
	}
	conditions := map[v1.PodConditionType]v1.ConditionStatus{
		v1.PodInitialized: v1.ConditionTrue, v1.ContainersReady: isReady, v1.PodReady: isReady,
	}
	for _, condition := range pod.Status.Conditions {
		delete(conditions, condition.Type)
	}
	for kind, status := range conditions {
		pod.Status.Conditions = append(pod.Status.Conditions,
			v1.PodCondition{Type: kind, Status: status, LastTransitionTime: now})
	}
	pod.Status.ContainerStatuses = nil
	for _, container := range pod.Spec.Containers {
		pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, v1.ContainerStatus{
			Name: container.Name, Image: container.Image, Ready: !isDone, Started: &isStarted, State: state,
		})
	}
	_, err := p.client.CoreV1().Pods(pod.Namespace).UpdateStatus(ctx, pod, metav1.UpdateOptions{})
	return err
}

// runPods reports pods of these nodes as running, and removes those that are to end, as kubelets do.
func (p *paper) runPods(ctx context.Context) {
	queue := workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[string]())
	factory := informers.NewSharedInformerFactory(p.client, 0)
	pods := factory.Core().V1().Pods()
	notice := func(object any) {
		if key, err := cache.MetaNamespaceKeyFunc(object); err == nil {
			queue.Add(key)
		}
	}
	pods.Informer().AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    notice,
		UpdateFunc: func(_, object any) { notice(object) },
	})
	factory.Start(ctx.Done())
	factory.WaitForCacheSync(ctx.Done())
	for range madeAtOnce {
		go func() {
			for {
				key, isShut := queue.Get()
				if isShut {
					return
				}
				namespace, name, _ := cache.SplitMetaNamespaceKey(key)
				pod, err := pods.Lister().Pods(namespace).Get(name)
				if err == nil {
					err = p.advance(ctx, pod)
				}
				if err == nil || apierrors.IsNotFound(err) {
					queue.Forget(key)
				} else {
					queue.AddRateLimited(key)
				}
				queue.Done(key)
			}
		}()
	}
	<-ctx.Done()
	queue.ShutDown()
}

// advance does the next step with a pod.
func (p *paper) advance(ctx context.Context, pod *v1.Pod) error {
	if !strings.HasPrefix(pod.Spec.NodeName, p.prefix+"-") {
		return nil
	}
	if pod.DeletionTimestamp != nil {
		at, uid := int64(0), types.UID(pod.UID)
		return p.client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
			GracePeriodSeconds: &at, Preconditions: &metav1.Preconditions{UID: &uid},
		})
	}
	if pod.Status.Phase != v1.PodPending {
		return nil
	}
	err := p.setRunning(ctx, pod)
	if apierrors.IsConflict(err) {
		// A newer version comes by the watch.
		return nil
	}
	return err
}
