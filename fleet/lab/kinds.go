package main

import (
	"context"
	"embed"
	"fmt"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"
)

// KubeVirt's kinds as far as tests need them: names, scope, subresources and the fields that matter to other programs.
//
//go:embed kinds/*.yaml
var kindFiles embed.FS

// Values of --vmi-status: which accounts may write the status of a VMI.
const (
	// As KubeVirt ships it: the kind has no status subresource, and a status that another program writes is put back.
	vmiStatusKubevirt = "kubevirt"
	// The status is a subresource, and a role decides.
	vmiStatusSubresource = "subresource"
)

const kindsManager = "fleet-lab"

// kubevirtKinds are objects to apply, as JSON, in this order.
func kubevirtKinds(vmiStatus string) ([][]byte, error) {
	names := []string{"virtualmachine.yaml", "virtualmachineinstance.yaml", "plugin.yaml"}
	switch vmiStatus {
	case vmiStatusKubevirt:
		names = append(names, "status-is-kubevirts.yaml", "status-is-kubevirts-binding.yaml")
	case vmiStatusSubresource:
	default:
		return nil, errUsage{fmt.Sprintf("cannot serve: --vmi-status is kubevirt or subresource, not %q", vmiStatus)}
	}
	var kinds [][]byte
	for _, name := range names {
		text, err := kindFiles.ReadFile("kinds/" + name)
		if err != nil {
			return nil, err
		}
		if vmiStatus == vmiStatusSubresource && name == "virtualmachineinstance.yaml" {
			text = append(text, "    subresources:\n      status: {}\n"...)
		}
		object, err := yaml.YAMLToJSON(text)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		kinds = append(kinds, object)
	}
	return kinds, nil
}

// applyKinds applies all of them, and waits until the server answers for the new kinds.
func applyKinds(ctx context.Context, config *rest.Config, kinds [][]byte) error {
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	force := true
	for _, kind := range kinds {
		object := &unstructured.Unstructured{}
		if err := object.UnmarshalJSON(kind); err != nil {
			return err
		}
		group := object.GroupVersionKind()
		plural := strings.ToLower(group.Kind) + "s"
		if strings.HasSuffix(group.Kind, "y") {
			plural = strings.TrimSuffix(strings.ToLower(group.Kind), "y") + "ies"
		}
		resource := client.Resource(schema.GroupVersionResource{
			Group: group.Group, Version: group.Version, Resource: plural,
		})
		options := metav1.PatchOptions{FieldManager: kindsManager, Force: &force}
		if _, err := resource.Patch(ctx, object.GetName(), types.ApplyPatchType, kind, options); err != nil {
			return fmt.Errorf("%s: %w", object.GetName(), err)
		}
		if group.Kind != "CustomResourceDefinition" {
			continue
		}
		isServed := func(ctx context.Context) (bool, error) {
			now, err := resource.Get(ctx, object.GetName(), metav1.GetOptions{})
			if err != nil {
				return false, nil
			}
			conditions, _, _ := unstructured.NestedSlice(now.Object, "status", "conditions")
			for _, condition := range conditions {
				fields, _ := condition.(map[string]any)
				if fields["type"] == "Established" && fields["status"] == "True" {
					return true, nil
				}
			}
			return false, nil
		}
		if err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, isServed); err != nil {
			return fmt.Errorf("%s is not established: %w", object.GetName(), err)
		}
		// For a moment after that its storage is still made, and requests get 429.
		names, _, _ := unstructured.NestedString(object.Object, "spec", "names", "plural")
		served, _, _ := unstructured.NestedString(object.Object, "spec", "group")
		versions, _, _ := unstructured.NestedSlice(object.Object, "spec", "versions")
		version, _, _ := unstructured.NestedString(versions[0].(map[string]any), "name")
		objects := client.Resource(schema.GroupVersionResource{Group: served, Version: version, Resource: names})
		isListed := func(ctx context.Context) (bool, error) {
			_, err := objects.List(ctx, metav1.ListOptions{})
			return err == nil, nil
		}
		if err := wait.PollUntilContextCancel(ctx, 50*time.Millisecond, true, isListed); err != nil {
			return fmt.Errorf("%s cannot be listed: %w", object.GetName(), err)
		}
	}
	return nil
}
